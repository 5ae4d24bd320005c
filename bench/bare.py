"""The reference for reads: nothing but `sendfile` on one side and `recv_into` on the other, in two processes.

For every byte it receives, the server sends `count` pages of one file. No framing, no checksums, no
index, default socket buffers: as fast as two Python processes can move these bytes over such a socket.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class BareClient:
    """The receiving side: asks with one byte, receives into the buffers in turn. Blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read(self, buffers: Sequence[memoryview]) -> None:
        """Fill every buffer. Raises ConnectionError when the server is gone."""
        self._sock.sendall(b"r")
        for buffer in buffers:
            rest = buffer
            while rest:
                received = self._sock.recv_into(rest)
                if not received:
                    raise ConnectionError("the bare server hung up")
                rest = rest[received:]


@contextmanager
def bare_server(
    path: Path, *, page_bytes: int, count: int, family: socket.AddressFamily
) -> Iterator[BareClient]:
    """A server process for `count` pages of the file at `path`, and a client connected to it."""
    address: str | tuple[str, int] = ("127.0.0.1", 0) if family == socket.AF_INET else str(path) + ".sock"
    with (
        socket.socket(family, socket.SOCK_STREAM) as listener,
        socket.socket(family, socket.SOCK_STREAM) as sock,
    ):
        listener.bind(address)
        listener.listen(1)
        command = [
            sys.executable,
            "-m",
            "bench.bare",
            str(path),
            str(page_bytes),
            str(count),
            str(listener.fileno()),
        ]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            try:
                sock.connect(listener.getsockname())
                yield BareClient(sock)
            finally:
                sock.close()
                process.wait(timeout=10)
    if family == socket.AF_UNIX:
        Path(str(address)).unlink()


def serve(path: Path, page_bytes: int, count: int, listener: socket.socket) -> None:
    """Serve one connection until it closes."""
    sock, _ = listener.accept()
    with sock, path.open("rb") as file:
        out, source = sock.fileno(), file.fileno()
        while sock.recv(1):
            for page in range(count):
                offset, end = page * page_bytes, (page + 1) * page_bytes
                while offset < end:
                    offset += os.sendfile(out, source, offset, end - offset)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), socket.socket(fileno=int(sys.argv[4])))
