"""The processes of a gateway with several workers: one that supervises, and the workers themselves.

    supervise    holds the directory and the sockets; starts workers, starts dead ones again, ends them all
    Assignment   what a worker is told on its command line, and what it makes of that

A worker is the same command as its parent with `--worker` at its end: a gateway with a store of its own, on
sockets that it inherits. Its parent keeps them open. So ports stay what they are when a worker dies, who
dials meanwhile waits instead of being refused, and clients that dial the gateway at large are answered by the
workers that live.

A worker that loses its parent ends at once, as a gateway of one process would have been killed with it.
"""

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Self

import anyio
import anyio.abc
import attrs

from adp_client.protocol.workers import Place, WorkerMap, encode_worker_map
from adp_client.transport import Endpoint, parse_endpoint

from .config import GatewayConfig
from .device.file import LOCK_NAME
from .errors import StorageError, StoreLocked
from .listeners import Listener, close_all, open_listeners
from .notify import notify
from .roster import (
    Roster,
    check_workers,
    make_roster,
    place_of,
    total_capacity_bytes,
    worker_config,
    worker_endpoint,
)

log = logging.getLogger(__name__)

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 10.0
HEALTHY_SECONDS = 60.0  # a worker that has served for so long and dies is started again without delay
KILL_SECONDS = 10.0  # beyond the grace time, for a worker that does not end


@attrs.frozen(kw_only=True)
class Socket:
    """A listening socket that a worker inherits, and where it listens."""

    descriptor: int
    endpoint: str


@attrs.frozen(kw_only=True)
class Door:
    """One `--listen` of the gateway: the sockets of a worker there, and the places of all workers."""

    sockets: tuple[Socket, ...]
    places: tuple[Place, ...]


@attrs.frozen(kw_only=True)
class Assignment:
    """What a worker is told by its parent."""

    worker: int
    roster: Roster
    capacity_bytes: int  # of all workers together
    lifeline: int  # a descriptor that becomes readable when the parent is gone
    doors: tuple[Door, ...]

    def to_text(self) -> str:
        """For a command line."""
        return json.dumps(
            {
                "worker": self.worker,
                "workers": self.roster.workers,
                "gateway_id": self.roster.gateway_id.hex(),
                "capacity_bytes": self.capacity_bytes,
                "lifeline": self.lifeline,
                "doors": [attrs.asdict(door) for door in self.doors],
            }
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The inverse of `to_text`. Raises ValueError, TypeError or KeyError for any other text."""
        told = json.loads(text)
        return cls(
            worker=told["worker"],
            roster=Roster(workers=told["workers"], gateway_id=bytes.fromhex(told["gateway_id"])),
            capacity_bytes=told["capacity_bytes"],
            lifeline=told["lifeline"],
            doors=tuple(
                Door(
                    sockets=tuple(Socket(**each) for each in door["sockets"]),
                    places=tuple(Place(**each) for each in door["places"]),
                )
                for door in told["doors"]
            ),
        )

    def config(self, config: GatewayConfig) -> GatewayConfig:
        """This worker's part of what the gateway is told."""
        store = attrs.evolve(config.store, capacity_bytes=self.capacity_bytes)
        directory = self.roster.directory(config.store.directory, self.worker)
        return worker_config(attrs.evolve(config, store=store), directory, self.worker, self.roster.workers)

    def listeners(self) -> list[Listener]:
        """The inherited sockets, which are this process's from now on."""
        made: list[Listener] = []
        for door in self.doors:
            told = WorkerMap(gateway_id=self.roster.gateway_id, places=door.places, worker=self.worker)
            extensions = (encode_worker_map(told),)
            for each in door.sockets:
                sock = socket.socket(fileno=each.descriptor)
                sock.setblocking(False)
                made.append(Listener(parse_endpoint(each.endpoint), sock, extensions=extensions))
        return made

    async def parent_gone(self) -> None:
        """Return when there is no parent any more."""
        await anyio.wait_readable(self.lifeline)


# ---------------------------------------------------------------- the parent


async def supervise(config: GatewayConfig, workers: int, command: Sequence[str]) -> int:
    """Run `workers` workers until a signal; the exit status. `command`: this process's own arguments.

    Raises StorageError or OSError if the gateway cannot start. Cancelled: every worker is killed.
    """
    data = config.store.directory
    with _locked(data, workers) as roster, _lifeline() as lifeline:
        capacity_bytes = config.store.capacity_bytes or total_capacity_bytes(data)
        async with _sockets(config, workers) as sockets:
            assignments = [
                Assignment(
                    worker=worker,
                    roster=roster,
                    capacity_bytes=capacity_bytes,
                    lifeline=lifeline,
                    doors=sockets.doors[worker],
                )
                for worker in range(workers)
            ]
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                return await _Supervisor(assignments, command, sockets, config.grace_seconds).run(signals)


@contextmanager
def _locked(data: Path, workers: int) -> Iterator[Roster]:
    """The directory, for this process alone."""
    check_workers(data, workers)
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(data / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreLocked(f"{data} is in use by another gateway") from None
        check_workers(data, workers)  # who had the lock until now may have made it
        yield make_roster(data, workers)
    finally:
        os.close(lock)


@contextmanager
def _lifeline() -> Iterator[int]:
    """A descriptor that is at its end when this process is gone, however it went."""
    held, end = os.pipe()
    try:
        yield held
    finally:
        os.close(held)
        os.close(end)


@attrs.define
class _Sockets:
    """All listeners of a gateway, those at large, and what each worker is told of them."""

    opened: list[Listener] = attrs.field(factory=list)
    at_large: list[Listener] = attrs.field(factory=list)
    doors: list[tuple[Door, ...]] = attrs.field(factory=list)

    async def open(self, config: GatewayConfig, workers: int) -> None:
        """Raises OSError; `opened` are open then."""
        self.doors = [()] * workers
        for endpoint in config.listen:
            at_large = await self._open(endpoint)
            self.at_large += at_large
            own = [await self._open(worker_endpoint(endpoint, worker)) for worker in range(workers)]
            places = tuple(place_of(listeners[0].endpoint) for listeners in own)
            for worker, listeners in enumerate(own):
                told = tuple(
                    Socket(descriptor=each.sock.fileno(), endpoint=str(each.endpoint))
                    for each in (*at_large, *listeners)
                )
                self.doors[worker] += (Door(sockets=told, places=places),)

    async def _open(self, endpoint: Endpoint) -> list[Listener]:
        listeners = await open_listeners([endpoint])
        self.opened += listeners
        return listeners

    def close(self) -> None:
        """Nobody else is accepted, once the workers have closed theirs too."""
        close_all(self.opened)


@asynccontextmanager
async def _sockets(config: GatewayConfig, workers: int) -> AsyncIterator[_Sockets]:
    sockets = _Sockets()
    try:
        await sockets.open(config, workers)
        yield sockets
    finally:
        sockets.close()


class _Supervisor:
    """The workers as processes. `run` once."""

    def __init__(
        self,
        assignments: Sequence[Assignment],
        command: Sequence[str],
        sockets: _Sockets,
        grace_seconds: float,
    ) -> None:
        self._assignments = assignments
        self._command = command
        self._sockets = sockets
        self._grace_seconds = grace_seconds
        self._processes: dict[int, anyio.abc.Process] = {}
        self._stopping = anyio.Event()
        self._down: set[int] = set()  # that have died, and do not serve yet
        self._was_cut = 0  # the signal that cut the drain short
        self._has_failed = False

    async def run(self, signals: AsyncIterator[signal.Signals]) -> int:
        """Start them all, keep them up until a signal comes, end them all; the exit status."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._obey, signals, tasks.cancel_scope)
            async with anyio.create_task_group() as keeping:
                async with anyio.create_task_group() as starting:
                    for assignment in self._assignments:
                        starting.start_soon(keeping.start, self._keep, assignment)
                if not self._stopping.is_set():
                    endpoints = " ".join(str(listener.endpoint) for listener in self._sockets.at_large)
                    log.info("%d workers serve %s", len(self._assignments), endpoints)
                    print(f"ready {endpoints}", flush=True)
                    notify("READY=1", f"STATUS={len(self._assignments)} workers serve {endpoints}")
            tasks.cancel_scope.cancel()
        if self._was_cut:
            return 128 + self._was_cut
        log.info(
            "stopped: status %d",
            self._has_failed,
            extra={"data": {"event": "stopped", "status": int(self._has_failed)}},
        )
        return int(self._has_failed)

    async def _obey(self, signals: AsyncIterator[signal.Signals], scope: anyio.CancelScope) -> None:
        """The first signal drains, the second cuts. A worker that does not end is killed in the end."""
        async with anyio.create_task_group() as tasks:
            async for number in signals:
                if self._stopping.is_set():
                    log.warning("%s again: cutting all connections", signal.Signals(number).name)
                    self._was_cut = number
                else:
                    log.info("%s: draining %d workers", signal.Signals(number).name, len(self._processes))
                    self._has_failed |= bool(self._down)
                    notify("STOPPING=1", "STATUS=draining")
                    self._stopping.set()
                    self._sockets.close()
                    tasks.start_soon(self._kill_late)
                for process in tuple(self._processes.values()):
                    with contextlib.suppress(ProcessLookupError):
                        process.terminate()

    async def _kill_late(self) -> None:
        await anyio.sleep(self._grace_seconds + KILL_SECONDS)
        for worker, process in self._processes.items():
            log.error("worker %d does not end: killing it", worker)
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _keep(
        self, assignment: Assignment, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """One worker, from one death to the next. Started when it serves for the first time.

        Raises StorageError if it never does.
        """
        worker, delay, is_started = assignment.worker, FIRST_DELAY_SECONDS, False
        while True:
            begun, is_serving = anyio.current_time(), False
            async with await self._spawn(assignment) as process:
                self._processes[worker] = process
                if self._stopping.is_set():  # its parent was told while it was being made
                    process.terminate()
                try:
                    if await _says_ready(process):
                        is_serving = True
                        self._down.discard(worker)
                        if not is_started:
                            is_started = True
                            task_status.started()
                        else:
                            log.info("worker %d serves again", worker)
                    status = await process.wait()
                finally:
                    del self._processes[worker]
            if self._stopping.is_set():
                self._has_failed |= is_serving and status != 0
                if not is_started:
                    task_status.started()
                return
            self._down.add(worker)
            reason = f"signal {-status}" if status < 0 else f"status {status}"
            if not is_started:
                raise StorageError(f"worker {worker} cannot start: {reason}")
            if anyio.current_time() - begun >= HEALTHY_SECONDS:
                delay = FIRST_DELAY_SECONDS
            log.error(
                "worker %d died (%s): starting it again in %.1f s",
                worker,
                reason,
                delay,
                extra={
                    "data": {"event": "worker_died", "worker": worker, "reason": reason, "seconds": delay}
                },
            )
            with anyio.move_on_after(delay):
                await self._stopping.wait()
                return
            delay = min(2 * delay, LONGEST_DELAY_SECONDS)

    async def _spawn(self, assignment: Assignment) -> anyio.abc.Process:
        """In a session of its own: what a terminal sends to all processes is for the parent alone."""
        return await anyio.open_process(
            [sys.executable, "-m", "adp_gateway", *self._command, "--worker", assignment.to_text()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None,
            env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
            start_new_session=True,
            pass_fds=[
                assignment.lifeline,
                *(each.descriptor for door in assignment.doors for each in door.sockets),
            ],
        )


async def _says_ready(process: anyio.abc.Process) -> bool:
    """Whether it has written its line: it serves. False: it has ended instead."""
    assert process.stdout is not None
    said = b""
    with contextlib.suppress(anyio.EndOfStream):
        while b"\n" not in said:
            said += await process.stdout.receive()
    return said.startswith(b"ready ")
