# ruff: noqa: ASYNC240  (a local disk may be touched here)
"""Endpoints: had, in use, stale, or something else altogether."""

import errno
import socket
import stat
from pathlib import Path

import pytest

from adp_client.transport import TCPEndpoint, TLSEndpoint, UnixEndpoint
from adp_gateway.listeners import close_all, open_listeners

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gateway.sock"


async def test_tcp_with_any_port() -> None:
    (listener,) = await open_listeners([TCPEndpoint(host="127.0.0.1", port=0)])
    assert isinstance(listener.endpoint, TCPEndpoint)
    assert listener.endpoint.port > 0
    with pytest.raises(OSError, match=rf"cannot listen on {listener.endpoint}: Address already in use"):
        await open_listeners([TCPEndpoint(host="127.0.0.1", port=0), listener.endpoint])
    close_all([listener])
    close_all(await open_listeners([listener.endpoint]))


async def test_tls_is_tcp_under_its_own_name() -> None:
    (listener,) = await open_listeners([TLSEndpoint(host="127.0.0.1", port=0)])
    assert isinstance(listener.endpoint, TLSEndpoint)
    assert str(listener.endpoint).startswith("tls://127.0.0.1:")
    close_all([listener])


async def test_unix_is_for_this_user_only_and_goes_when_closed(path: Path) -> None:
    (listener,) = await open_listeners([UnixEndpoint(path=str(path))])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    assert not path.exists()
    listener.close()


async def test_unix_in_use(path: Path) -> None:
    endpoint = UnixEndpoint(path=str(path))
    (listener,) = await open_listeners([endpoint])
    with pytest.raises(OSError, match="Address already in use") as caught:
        await open_listeners([endpoint])
    assert caught.value.errno == errno.EADDRINUSE
    assert path.exists()
    listener.close()


async def test_unix_left_by_a_dead_gateway(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    close_all(await open_listeners([UnixEndpoint(path=str(path))]))


async def test_unix_where_there_is_a_file(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(OSError, match="not a socket"):
        await open_listeners([UnixEndpoint(path=str(path))])
    assert path.read_text() == "precious"


async def test_unix_socket_of_a_successor_stays(path: Path) -> None:
    (listener,) = await open_listeners([UnixEndpoint(path=str(path))])
    path.rename(path.with_suffix(".old"))  # so that the inode number is not used again
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        listener.close()
        assert path.exists()


async def test_all_or_none(path: Path) -> None:
    with pytest.raises(OSError, match="no-such-directory"):
        await open_listeners([UnixEndpoint(path=str(path)), UnixEndpoint(path="/no-such-directory/socket")])
    assert not path.exists()


async def test_a_name_that_does_not_resolve() -> None:
    with pytest.raises(OSError, match=r"cannot listen on tcp://host\.invalid:1: "):
        await open_listeners([TCPEndpoint(host="host.invalid", port=1)])
