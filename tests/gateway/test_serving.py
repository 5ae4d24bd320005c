"""Starting and ending in this process, on both event loops."""

import os
import signal
import threading
from pathlib import Path

import pytest

from adp_client.transport import UnixEndpoint
from adp_gateway import serving
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.errors import NotAStore, StorageError
from adp_gateway.serving import serve_until_signal
from adp_gateway.store import segments

pytestmark = pytest.mark.anyio


def config(tmp_path: Path) -> GatewayConfig:
    store = StoreConfig(directory=tmp_path / "kv", capacity_bytes=1 << 20, segment_bytes=1 << 16)
    listen = (UnixEndpoint(path=f"{tmp_path}/s"),)
    return GatewayConfig(store=store, listen=listen, admin=UnixEndpoint(path=f"{tmp_path}/admin"))


async def test_a_signal_while_the_store_is_opened_ends_it_without_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long recovery takes: nobody is told that it is ready, and the store is closed as usual."""
    told, seen = list[str](), threading.Event()
    real = segments.open_device

    def slow(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen.wait(10)
        return real(*args)

    def notified(*lines: str) -> None:
        told.extend(lines)
        seen.set()

    monkeypatch.setattr(segments, "open_device", slow)
    monkeypatch.setattr(serving, "notify", notified)
    assert await serve_until_signal(config(tmp_path)) == 0
    assert told == ["STOPPING=1", "STATUS=draining"]
    assert capsys.readouterr().out == ""
    assert os.listdir(tmp_path) == ["kv"], "sockets are gone"  # noqa: PTH208
    monkeypatch.undo()
    async with segments.SegmentStore.open(config(tmp_path).store):
        pass


@pytest.mark.parametrize("kind", ["foreign", "file", "dangling"])
async def test_what_cannot_be_a_store_is_left_as_it_is(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "kv"
    if kind == "foreign":
        data.mkdir()
        (data / "thesis.txt").write_text("x")
    elif kind == "file":
        data.write_text("x")
    else:
        data.symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotAStore if kind == "foreign" else StorageError):
        await serve_until_signal(config(tmp_path))
    assert os.listdir(tmp_path) == ["kv"]  # noqa: PTH208
    assert kind != "foreign" or os.listdir(data) == ["thesis.txt"]  # noqa: PTH208


async def test_a_directory_that_may_not_be_written_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kv").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # tests may run as root
    with pytest.raises(StorageError, match="kv cannot be read and written by this user"):
        await serve_until_signal(config(tmp_path))
    assert list((tmp_path / "kv").iterdir()) == []
