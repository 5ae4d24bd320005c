"""A real gateway process, for tests."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs

from adp_client.protocol.messages import Hello
from adp_client.transport import connect, parse_endpoint
from gateway.peer import Peer


@attrs.define
class Gateway:
    """A process that has said that it is ready."""

    process: "subprocess.Popen[str]"
    log: Path  # its standard error: a file, because nobody reads a pipe meanwhile
    endpoints: list[str]
    peers: list[Peer] = attrs.field(factory=list)

    async def call(self, which: int = 0, hello: Hello | None = None) -> Peer:
        """A peer that has said nothing yet."""
        peer = Peer(await connect(parse_endpoint(self.endpoints[which])), hello)
        self.peers.append(peer)
        return peer

    async def dial(self, which: int = 0, hello: Hello | None = None) -> Peer:
        """A peer whose connection is open."""
        peer = await self.call(which, hello)
        await peer.open()
        return peer

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait; the exit status and what stood on standard error."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """The same without a signal."""
        return self.process.wait(timeout=15), self.log.read_text()


def command(data: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "adp_gateway", "serve", "--data", str(data), *options]


@asynccontextmanager
async def gateway(
    data: Path, *options: str, listen: tuple[str, ...] = ("tcp://127.0.0.1:0",)
) -> AsyncIterator[Gateway]:
    """Within: it serves. After: it is gone, and so are its peers, however the test ended."""
    with running(data, *options, listen=listen) as served:
        try:
            yield served
        finally:
            for peer in served.peers:
                await peer.transport.aclose()
    assert "Traceback" not in served.log.read_text()


@contextmanager
def running(data: Path, *options: str, listen: tuple[str, ...] = ("tcp://127.0.0.1:0",)) -> Iterator[Gateway]:
    """The same without peers."""
    capacity = () if "--capacity" in options else ("--capacity", "64MiB", "--max-object", "8MiB")
    listening = [word for endpoint in listen for word in ("--listen", endpoint)]
    log = data.parent / f"{data.name}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command(data, *capacity, *listening, *options),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
    try:
        assert process.stdout is not None
        word, *endpoints = process.stdout.readline().split() or [""]
        if word != "ready":
            raise AssertionError(f"not ready, status {process.wait(timeout=15)}: {log.read_text()}")
        yield Gateway(process, log, endpoints)
    finally:
        process.kill()
        process.communicate()
