"""Sockets that clients dial. Raises OSError where an endpoint cannot be had; leaves nothing behind then."""

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import anyio
import attrs

from adp_client.protocol.messages import Extension
from adp_client.transport import Endpoint, TCPEndpoint, TLSEndpoint, UnixEndpoint

BACKLOG = 1024
ACCEPT_PAUSE_SECONDS = 0.1  # after accept() failed for want of descriptors: somebody has to close one first
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@attrs.define(eq=False)
class Listener:
    """A listening socket. `endpoint` is where it really is: port 0 has become a number.

    `extensions` are what WELCOME says to those who come this way.
    """

    endpoint: Endpoint
    sock: socket.socket
    _inode: tuple[int, int] | None = None  # of a Unix socket's file, so that only ours is ever removed
    extensions: tuple[Extension, ...] = ()

    def close(self) -> None:
        """Stop listening. The file of a Unix socket goes, unless it is another's by now."""
        self.sock.close()
        if isinstance(self.endpoint, UnixEndpoint) and self._inode is not None:
            with contextlib.suppress(OSError):
                if _inode(self.endpoint.path) == self._inode:
                    Path(self.endpoint.path).unlink()


async def open_listeners(endpoints: Iterable[Endpoint]) -> list[Listener]:
    """Listen on all `endpoints`, or on none. Raises OSError whose text begins with the endpoint."""
    listeners: list[Listener] = []
    try:
        for endpoint in endpoints:
            try:
                if isinstance(endpoint, UnixEndpoint):
                    listeners.append(_listen_unix(endpoint))
                else:
                    listeners.extend(await _listen_tcp(endpoint))
            except OSError as exc:
                reason = exc.strerror or str(exc)
                raise OSError(exc.errno, f"cannot listen on {endpoint}: {reason}") from exc
    except BaseException:
        close_all(listeners)
        raise
    return listeners


def close_all(listeners: Iterable[Listener]) -> None:
    """Close each of them."""
    for listener in listeners:
        listener.close()


async def accept(
    listener: Listener, on_shortage: Callable[[Listener, OSError], None]
) -> tuple[socket.socket, Any]:
    """The next connection and its address. Where the process has no descriptor for it, say so and wait."""
    while True:
        try:
            return listener.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            await anyio.wait_readable(listener.sock)
        except OSError as exc:
            if exc.errno not in _SHORTAGES:
                raise
            on_shortage(listener, exc)
            await anyio.sleep(ACCEPT_PAUSE_SECONDS)


def peer_name(listener: Listener, address: Any) -> str:
    """Where a connection comes from, as an endpoint; without a number of its own if it has no address."""
    if isinstance(listener.endpoint, UnixEndpoint):
        return str(listener.endpoint)
    return str(attrs.evolve(listener.endpoint, host=address[0], port=address[1]))


async def _listen_tcp(endpoint: TCPEndpoint | TLSEndpoint) -> list[Listener]:
    """One listener for each address of the host: `localhost` is often two."""
    found = await anyio.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    port = endpoint.port
    listeners: list[Listener] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, _, _, _, address in found):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address[0], port, *address[2:]))
                sock.listen(BACKLOG)
                sock.setblocking(False)
            except BaseException:
                sock.close()
                raise
            port = sock.getsockname()[1]  # port 0: the same number for the other addresses
            listeners.append(Listener(attrs.evolve(endpoint, host=str(address[0]), port=port), sock))
    except BaseException:
        close_all(listeners)
        raise
    return listeners


def _listen_unix(endpoint: UnixEndpoint) -> Listener:
    """For this user only. A socket that a dead gateway left is replaced, nothing else is."""
    _remove_stale(endpoint.path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(sock.fileno(), 0o600)  # bind makes the file with the mode of the socket: no window
        sock.bind(endpoint.path)
        inode = _inode(endpoint.path)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return Listener(endpoint, sock, inode)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "there is a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(path)
    if code != errno.ECONNREFUSED:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    Path(path).unlink()


def _inode(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
