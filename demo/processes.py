"""The two programs of the demo, each a real process: the gateway and the engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import attrs
from anyio.streams.buffered import BufferedByteReceiveStream

MAX_ANSWER_BYTES = 1 << 20
DRAIN_SECONDS = 20.0


class ProcessDied(Exception):
    """A process of the demo ended when it should have answered; the text says which one, and its log."""


def adp_gateway() -> str:
    """The command beside this interpreter: the demo runs where the package is installed."""
    return str(Path(sys.executable).with_name("adp-gateway"))


@asynccontextmanager
async def run_gateway(*, data: Path, endpoint: str, log: Path) -> AsyncIterator[str]:
    """`adp-gateway serve` on a directory; gives the endpoint clients can connect to (port 0 chosen by then).

    Drained with SIGTERM on the way out. Raises ProcessDied when it does not start or does not end well by
    itself. On cancellation it is killed.
    """
    with log.open("wb") as stderr:
        process = await anyio.open_process(
            [adp_gateway(), "serve", "--data", str(data), "--listen", endpoint],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C reaches us, and we drain the gateway
        )
    try:
        assert process.stdout is not None
        try:
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", MAX_ANSWER_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream) as error:
            raise ProcessDied(f"the gateway did not start; its log: {log}") from error
        ready, listening = line.decode().split()
        assert ready == "ready"
        yield listening
        with suppress(ProcessLookupError):
            process.terminate()
        with anyio.move_on_after(DRAIN_SECONDS):
            await process.wait()
        if process.returncode != 0:
            how = "still ran" if process.returncode is None else f"ended with status {process.returncode}"
            raise ProcessDied(f"the gateway {how} after SIGTERM; its log: {log}")
    finally:
        await _kill(process)


@attrs.frozen(kw_only=True)
class Generated:
    """What the engine said to one prompt."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int
    ttft_seconds: float


@attrs.define
class EngineProcess:
    """The engine under its driver (`driver.py`). One question at a time."""

    _process: anyio.abc.Process
    _answers: BufferedByteReceiveStream
    _log: Path
    vllm: str = ""
    block_size: int = 0
    namespace: bytes = b""  # of the adapter; empty without one

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send one line, return the answer. Raises ProcessDied when there is none."""
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(json.dumps(message).encode() + b"\n")
            return await self.answer()
        except anyio.BrokenResourceError as error:
            raise self._died() from error

    async def answer(self) -> dict[str, Any]:
        """The next line. Raises ProcessDied at the end of the stream."""
        try:
            line = await self._answers.receive_until(b"\n", MAX_ANSWER_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream) as error:
            raise self._died() from error
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def generate(self, name: str, prompt: Sequence[int], *, max_tokens: int) -> Generated:
        """Run one request to its end."""
        question = {"do": "generate", "name": name, "prompt": list(prompt), "max_tokens": max_tokens}
        return Generated(**await self.ask(question))

    async def record(self, folder: Path) -> int:
        """Have the driver write down the engine's cached blocks; the number of new ones."""
        return int((await self.ask({"do": "record", "folder": str(folder)}))["blocks"])

    async def kill(self) -> None:
        """SIGKILL: no goodbye, no flush."""
        await _kill(self._process)

    def _died(self) -> ProcessDied:
        return ProcessDied(f"the engine died; its log: {self._log}")


@asynccontextmanager
async def run_engine(
    *, model: Path, transfer: Mapping[str, Any] | None, blocks: int, max_model_len: int, log: Path
) -> AsyncIterator[EngineProcess]:
    """Real vLLM in its own process, ready for prompts; killed on the way out.

    `transfer` is what a user writes after --kv-transfer-config; None runs the engine without a connector.
    Raises ProcessDied when it does not start.
    """
    command = [sys.executable, "-m", "demo.driver", "--model", str(model)]
    command += ["--blocks", str(blocks), "--max-model-len", str(max_model_len)]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    with log.open("wb") as stderr:
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    try:
        assert process.stdout is not None
        engine = EngineProcess(process, BufferedByteReceiveStream(process.stdout), log)
        ready = await engine.answer()
        engine.vllm, engine.block_size = ready["vllm"], ready["block_size"]
        engine.namespace = bytes.fromhex(ready["namespace"])
        yield engine
    finally:
        await _kill(process)


async def _kill(process: anyio.abc.Process) -> None:
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(process.pid, signal.SIGKILL)  # its children too: libraries start compilers and trackers
    with anyio.CancelScope(shield=True):  # a killed process ends at once; not waiting would leave a zombie
        await process.aclose()
