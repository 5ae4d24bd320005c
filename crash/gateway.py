"""A real gateway process that is there to be killed, and the offline check of what it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc
import attrs
from anyio.streams.buffered import BufferedByteReceiveStream

READY_SECONDS = 60.0  # on a machine that does much else
DRAIN_SECONDS = 30.0


class GatewayFailed(Exception):
    """It did not start, or did not end as it should; the text ends with its log."""


@attrs.define(eq=False)
class Gateway:
    """One process. Made by `spawn`; somebody has to `kill` or `stop` it."""

    _process: anyio.abc.Process
    _log: Path
    _began: float
    endpoints: list[str] = attrs.field(factory=list)

    @classmethod
    async def spawn(cls, data: Path, options: Sequence[str], log: Path) -> Gateway:
        """Start `adp-gateway serve`; returns before it is ready."""
        command = [sys.executable, "-m", "adp_gateway", "serve", "--data", str(data), *options]
        with log.open("ab") as stderr:
            began = time.monotonic()
            process = await anyio.open_process(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
            )
        return cls(process, log, began)

    async def ready(self) -> float:
        """Wait for the line that says so; how many seconds that was after the start."""
        assert self._process.stdout is not None
        try:
            with anyio.fail_after(READY_SECONDS):
                line = await BufferedByteReceiveStream(self._process.stdout).receive_until(b"\n", 65536)
        except (anyio.IncompleteRead, anyio.EndOfStream, TimeoutError):
            await self.kill()
            raise GatewayFailed(f"the gateway did not start: {self._last_words()}") from None
        word, *self.endpoints = line.decode().split()
        assert word == "ready"
        return time.monotonic() - self._began

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Harmless if it is."""
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            await self._process.aclose()

    async def stop(self) -> None:
        """SIGTERM. Raises GatewayFailed unless it ends with status 0 in time."""
        self._process.send_signal(signal.SIGTERM)
        with anyio.move_on_after(DRAIN_SECONDS):
            await self._process.wait()
        status = self._process.returncode
        await self.kill()
        if status != 0:
            raise GatewayFailed(f"the gateway ended with {status} after SIGTERM: {self._last_words()}")

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-5:])


async def check(data: Path) -> str:
    """`adp-gateway check`; empty if all is whole, else what it says."""
    command = [sys.executable, "-m", "adp_gateway", "check", "--data", str(data)]
    done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT)
    return "" if done.returncode == 0 else done.stdout.decode(errors="replace").strip()


def disk_bytes(data: Path) -> int:
    """What the files of a directory take: their lengths or their blocks, whichever is more."""
    total = 0
    for path in data.glob("*"):
        with suppress(FileNotFoundError):  # a segment that is just being removed
            status = path.stat()
            total += max(status.st_size, status.st_blocks * 512)
    return total
