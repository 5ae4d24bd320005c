"""The live mode's command: workers that run cases, the bystander, progress, and the end."""

import argparse
import os
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc
import attrs

from adp_client.testing.conformance.tls_options import chosen_tls

from .cases import BadCaseFile, Case, CaseFile, load, moved, save
from .drive import Bystander, Gateway, GatewayLeaves, Sequence, Tally, greet
from .generate import MAX_CONNECTIONS, generate
from .model import Finding
from .watch import features_of, limits_of

_T = TypeVar("_T")

EXIT_CLEAN = 0
EXIT_FOUND = 1
EXIT_UNUSABLE = 2
EXIT_INTERRUPTED = 130
PROGRESS_SECONDS = 5.0
REPLAY_ROUNDS = 20
RECENT = 8  # cases that a finding beside the sequences may be due to
BYSTANDER_PAUSE_SECONDS = 0.02
FINDINGS = Path(__file__).parents[1] / "findings" / "live"


@attrs.define(kw_only=True)
class Run:
    """One run of the live mode."""

    gateway: Gateway
    seed: int
    seconds: float
    connections: int = 6
    most_sequences: int | None = None
    replayed: tuple[Case, ...] | None = None  # instead of what the seed says
    case_file: Path | None = None
    watches_signals: bool = True
    status: int = EXIT_CLEAN
    tally: Tally = attrs.field(factory=Tally)
    finding: str | None = None
    written: Path | None = None
    _bystander: Bystander | None = attrs.field(default=None, init=False)
    _round_over: anyio.Event = attrs.field(factory=anyio.Event, init=False)
    _began: float = attrs.field(default=0.0, init=False)
    _under_way: dict[int, Sequence] = attrs.field(factory=dict, init=False)
    _recent: deque[Sequence] = attrs.field(factory=lambda: deque(maxlen=RECENT), init=False)
    _facts: dict[str, object] = attrs.field(factory=dict, init=False)
    _last_reason: str | None = attrs.field(default=None, init=False)

    async def run(self) -> int:
        """Until it has been long enough, or something is found. The exit status."""
        self.status = await self._run()
        return self.status

    async def _run(self) -> int:
        self._began = time.monotonic()
        try:
            welcome = await _alone(greet(self.gateway))
        except (Finding, GatewayLeaves) as exc:
            print(f"cannot fuzz {self.gateway.endpoint}: {exc}", flush=True)
            return EXIT_UNUSABLE
        self._facts = {
            "agent": welcome.agent,
            "features": features_of(welcome),
            "limits": limits_of(welcome),
        }
        salt = os.urandom(16)

        def cases() -> Iterator[Case]:
            if self.replayed is not None:
                for case in self.replayed:
                    yield moved(case, [os.urandom(len(namespace)) for namespace in case.namespaces])
                return
            number = 0
            while self.most_sequences is None or number < self.most_sequences:
                yield generate(self.seed, number, welcome, salt=salt)
                number += 1

        source = cases()
        workers = 1 if self.replayed is not None else max(1, self.connections // MAX_CONNECTIONS)
        try:
            async with anyio.create_task_group() as tasks:
                if self.watches_signals:
                    await tasks.start(self._stop_on_signal, tasks.cancel_scope)
                who = welcome.agent or "no name"
                print(f"fuzzing {self.gateway.endpoint} ({who}), seed {self.seed}", flush=True)
                self._bystander = Bystander(self.gateway, os.urandom(32))
                started = anyio.Event()
                tasks.start_soon(self._stand_by, started)
                tasks.start_soon(self._tell_progress)
                await started.wait()
                with anyio.move_on_after(self.seconds if self.replayed is None else None):
                    async with anyio.create_task_group() as working:
                        for worker in range(workers):
                            working.start_soon(self._work, worker, source, welcome.boot_id)
                await self._more_rounds()
                tasks.cancel_scope.cancel()
        except* GatewayLeaves as group:
            self._last_reason = str(_first(group))
        except* Finding as group:
            self.finding = str(_first(group))
            self._write()
        self._tell_end()
        if self.finding is not None:
            return EXIT_FOUND
        return EXIT_CLEAN if self._last_reason is None else EXIT_UNUSABLE

    async def _work(self, worker: int, source: Iterator[Case], boot_id: bytes) -> None:
        for case in source:
            sequence = self._under_way[worker] = Sequence(case, self.gateway, self.tally, boot_id)
            await sequence.run()
            self._recent.append(sequence)
        self._under_way.pop(worker, None)

    async def _stand_by(self, started: anyio.Event) -> None:
        async def turn() -> None:
            started.set()
            self._round_over.set()
            self._round_over = anyio.Event()
            await anyio.sleep(BYSTANDER_PAUSE_SECONDS)

        assert self._bystander is not None
        await self._bystander.run(turn)

    async def _more_rounds(self) -> None:
        """What the last sequence has done to others shows in a round that began after it.

        A replay may have nothing but these: the bystander itself finds what is wrong with anything.
        """
        for _ in range(2 if self.replayed is None else REPLAY_ROUNDS):
            await self._round_over.wait()

    async def _stop_on_signal(
        self, scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]
    ) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                print("stopping", flush=True)
                scope.cancel()
                return

    async def _tell_progress(self) -> None:
        while True:
            await anyio.sleep(PROGRESS_SECONDS)
            print(self._progress(), flush=True)

    def _progress(self) -> str:
        seconds = time.monotonic() - self._began
        tally = self.tally
        return (
            f"{seconds:.0f} s: {tally.sequences} sequences ({tally.sequences / seconds:.1f}/s), "
            f"{tally.connections} connections, {tally.sent_bytes >> 10} KiB, "
            f"{tally.violations} violations, {sum(tally.errors.values())} ERRORs"
        )

    def _tell_end(self) -> None:
        print(self._progress())
        for title, counts in (("ERRORs", self.tally.errors), ("items", self.tally.statuses)):
            if counts:
                print(f"{title}: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
        if self.tally.other_codes:
            print(f"violations answered with another code than here: {self.tally.other_codes}")
        if self._bystander is not None:
            print(
                f"bystander: {self._bystander.rounds} rounds, the slowest answer took "
                f"{self._bystander.worst_seconds * 1000:.0f} ms"
            )
        if self.finding is not None:
            print(f"FOUND: {self.finding}")
            print(f"again: python -m fuzz --target {self.gateway.endpoint} --replay {self.written}")
        else:
            print(self._last_reason or "nothing found")
        sys.stdout.flush()

    def _write(self) -> None:
        """The case that failed; if it was none of them, those that are under way and some before."""
        sequences = [sequence for sequence in self._under_way.values() if sequence.is_at_fault]
        if not sequences:
            sequences = [*self._recent, *self._under_way.values()]
        assert self.finding is not None
        self.written = self.case_file or FINDINGS / f"seed-{self.seed}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        file = CaseFile(
            finding=self.finding,
            seed=self.seed,
            gateway=self._facts,
            cases=tuple(sequence.case for sequence in sequences),
        )
        save(self.written, file, {sequence.case.number: sequence.expected for sequence in sequences})


async def _alone(work: Awaitable[_T]) -> _T:
    """What goes wrong in a task group of one, without the group."""
    try:
        return await work
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """What the command line asks for."""
    if options.connections < MAX_CONNECTIONS:
        parser.error(f"--connections must be at least {MAX_CONNECTIONS}: one sequence uses as many")
    if options.deadline <= 0 or options.seconds <= 0:
        parser.error("--deadline and --seconds must be above 0")
    try:
        token = (
            options.token_file.read_bytes().strip() if options.token_file else (options.token or "").encode()
        )
        replayed = None if options.replay is None else load(options.replay)
        tls = chosen_tls(options.target, options)
    except (OSError, ValueError, BadCaseFile) as exc:
        parser.error(str(exc))
    seed = options.seed
    if seed is None:
        seed = random.SystemRandom().getrandbits(32) if replayed is None else replayed.seed
    gateway = Gateway(endpoint=options.target, deadline=options.deadline, token=token, tls=tls)
    live = Run(
        gateway=gateway,
        seed=seed,
        seconds=options.seconds,
        connections=options.connections,
        replayed=None if replayed is None else replayed.cases,
        case_file=options.case_file,
    )
    try:
        return anyio.run(live.run)
    except KeyboardInterrupt:  # before the run had begun
        return EXIT_INTERRUPTED
