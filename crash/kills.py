"""Loops of: start on a directory, a storm of clients, SIGKILL at a drawn moment, start again, look around.

A loop is drawn from the seed and its number: how much room there is (so much that nothing is evicted, or so
little that something always is), the durability, the sizes around the device's command, how many clients,
and when it is killed, maybe again while it starts. Only the moments at which packets arrive are not drawn.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import attrs

from adp_client import Client, ClientConfig, ErrorCode

from .gateway import Gateway, GatewayFailed, check, disk_bytes
from .history import History, Name
from .problems import Problems
from .storm import Storm, Tally

KIB, MIB = 1 << 10, 1 << 20
STORM_SECONDS = (0.02, 0.7)
STARTUP_KILL_SHARE = 0.4
SAMPLE_SECONDS = 0.02
FIRST_ANSWER_SECONDS = 30.0


@attrs.frozen(kw_only=True)
class Plan:
    """One loop."""

    is_roomy: bool
    durability: str
    command_bytes: int
    clients: int
    storms: int

    @classmethod
    def draw(cls, source: random.Random) -> Plan:
        """The next one."""
        return cls(
            is_roomy=source.random() < 0.5,
            durability=source.choice(["relaxed", "relaxed", "durable"]),
            command_bytes=source.choice([64 * KIB, 256 * KIB]),
            clients=source.randint(3, 5),
            storms=source.randint(1, 3),
        )

    @property
    def capacity_bytes(self) -> int:
        """Room for all that a loop may write, or for a few dozen objects."""
        return 2048 * MIB if self.is_roomy else 24 * MIB

    @property
    def segment_bytes(self) -> int:
        return 64 * MIB if self.is_roomy else 4 * MIB

    @property
    def sizes(self) -> list[int]:
        """Around the device's command; small ones more often, so that there are many."""
        command = self.command_bytes
        sizes = [0, 1, command - 1, command, command + 1, int(3.4 * command), 3 * MIB]
        return sizes + [100, 5000, 20_000] * 4

    @property
    def options(self) -> list[str]:
        return [
            *("--capacity", str(self.capacity_bytes), "--segment", str(self.segment_bytes)),
            *("--durability", self.durability, "--max-command", str(self.command_bytes)),
            *("--max-object", str(max(self.sizes)), "--io-threads", "4"),
        ]

    def __str__(self) -> str:
        room = "roomy" if self.is_roomy else "tight"
        return f"{room}, {self.durability}, {self.clients} clients"


@attrs.define
class KillReport:
    """All loops so far."""

    seed: int
    loops: int = 0
    kills_in_storms: int = 0
    kills_in_starts: int = 0
    verified: int = 0  # objects looked at after a restart
    acknowledged: int = 0
    restart_seconds: list[float] = attrs.field(factory=list)
    tally: Tally = attrs.field(factory=Tally)
    problems: Problems = attrs.field(factory=Problems)

    @property
    def kills(self) -> int:
        """Of all kinds."""
        return self.kills_in_storms + self.kills_in_starts

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, and something was tried."""
        return not self.problems.texts and self.verified > 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What the table at the end says."""
        tally, times = self.tally, sorted(self.restart_seconds)
        rows = [
            ("seed", f"{self.seed}"),
            ("loops", f"{self.loops}"),
            ("kills in storms, in starts", f"{self.kills_in_storms}, {self.kills_in_starts}"),
            (
                "acknowledged",
                f"{tally.writes:,} writes ({tally.written_bytes >> 20:,} MiB), {tally.deletes:,} deletes",
            ),
            ("refused for want of room", f"{tally.refused:,}"),
            (
                "read in storms",
                f"{tally.reads:,} objects, {tally.leased_reads:,} of them leased, {tally.misses:,} misses",
            ),
            ("looked at after restarts", f"{self.verified:,} names"),
        ]
        if times:
            p99 = times[min(len(times) - 1, int(0.99 * len(times)))]
            rows.append(
                (
                    "from start to ready",
                    f"median {statistics.median(times) * 1000:,.0f} ms, p99 {p99 * 1000:,.0f} ms",
                )
            )
        for kind in (
            "corrupt",
            "phantom",
            "half",
            "lost",
            "lease",
            "check",
            "capacity",
            "gateway",
            "refused",
        ):
            rows.append((kind, f"{self.problems.counts.get(kind, 0)}"))
        return rows


class Loop:
    """One loop in a directory of its own."""

    def __init__(self, report: KillReport, number: int, folder: Path) -> None:
        self._report = report
        self._source = random.Random(f"{report.seed} {number}")
        self.plan = Plan.draw(self._source)
        self._data = folder / "kv"
        self._log = folder / "gateway.log"
        self._options = [
            *self.plan.options,
            "--listen",
            "tcp://127.0.0.1:0",
            "--listen",
            f"unix://{folder}/s",
        ]
        self._moment = 0
        self._history = History(self._tick)

    def _tick(self) -> int:
        self._moment += 1
        return self._moment

    async def run(self) -> None:
        """Play it; what is wrong is in the report. Raises GatewayFailed."""
        report = self._report
        for turn in range(self.plan.storms + 1):
            if turn and self._source.random() < STARTUP_KILL_SHARE:
                await self._kill_in_start()
            gateway = await Gateway.spawn(self._data, self._options, self._log)
            try:
                seconds = await gateway.ready()
                if turn:
                    report.restart_seconds.append(seconds)
                    await self._verify(gateway)
                if turn < self.plan.storms:
                    await self._storm(gateway)
                    report.kills_in_storms += 1
                else:
                    await gateway.stop()
            finally:
                await gateway.kill()
            self._measure("after the gateway ended")
        if said := await check(self._data):
            report.problems.add("check", said)
        report.acknowledged += self._history.acknowledged

    async def _kill_in_start(self) -> None:
        """Somewhere between its first instruction and a little after it is ready."""
        usual = statistics.median(self._report.restart_seconds or [0.5])
        gateway = await Gateway.spawn(self._data, self._options, self._log)
        try:
            await anyio.sleep(self._source.uniform(0.5, 1.05) * usual)
        finally:
            await gateway.kill()
        self._report.kills_in_starts += 1

    async def _storm(self, gateway: Gateway) -> None:
        """The moment of the kill counts from the first acknowledgement: connecting takes its time."""
        report = self._report
        storm = Storm(
            history=self._history,
            tally=report.tally,
            problems=report.problems,
            sizes=self.plan.sizes,
            may_evict=not self.plan.is_roomy,
            budget_bytes=report.tally.written_bytes + self.plan.capacity_bytes // (2 * self.plan.storms)
            if self.plan.is_roomy
            else 1 << 62,
        )
        delay = self._source.uniform(*STORM_SECONDS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storm.run, gateway.endpoints, self.plan.clients, self._source)
            with anyio.move_on_after(FIRST_ANSWER_SECONDS):
                await storm.has_begun.wait()
            deadline = anyio.current_time() + delay
            while anyio.current_time() < deadline:
                await anyio.sleep(min(SAMPLE_SECONDS, max(0.0, deadline - anyio.current_time())))
                self._measure("in a storm")
            # Killed first, and the clients stopped only then: what they have in flight is cut, not drained.
            await gateway.kill()
            tasks.cancel_scope.cancel()

    def _measure(self, when: str) -> None:
        used = disk_bytes(self._data)
        if used > self.plan.capacity_bytes:
            self._report.problems.add("capacity", f"{used} of {self.plan.capacity_bytes} bytes {when}")

    async def _verify(self, gateway: Gateway) -> None:
        """Look at every name there ever was."""
        async with Client(ClientConfig(endpoint=gateway.endpoints[-1])) as client:
            by_namespace: dict[bytes, list[Name]] = {}
            for name in self._history.names:
                by_namespace.setdefault(name[0], []).append(name)
            for namespace, names in by_namespace.items():
                for start in range(0, len(names), 8):
                    await self._verify_some(client, namespace, names[start : start + 8])

    async def _verify_some(self, client: Client, namespace: bytes, names: list[Name]) -> None:
        report, history = self._report, self._history
        keys = [key for _, key in names]
        there = (await client.exist(namespace, keys)).statuses
        buffers = [bytearray(history.longest(name)) for name in names]
        result = await client.read(namespace, keys, buffers)
        for name, exists, status, length, buffer in zip(
            names, there, result.statuses, result.lengths, buffers, strict=True
        ):
            report.verified += 1
            if status != exists:
                report.problems.add(
                    "corrupt",
                    f"{name[1]!r}: EXIST says {ErrorCode(exists).name}, READ {ErrorCode(status).name}",
                )
                continue
            found = bytes(memoryview(buffer)[:length]) if status == ErrorCode.OK else None
            now = history.now()
            verdict = history.judge(name, found, now, now, may_evict=not self.plan.is_roomy)
            if verdict is not None:
                report.problems.add(
                    verdict.name.lower(),
                    f"{name[1]!r} after a restart: {verdict.value}; allowed: {history.tell(name, now, now)}",
                )
            elif found is None and self.plan.is_roomy:
                history.settle_absent(name)
            else:
                history.settle(name, found)


async def run(
    seed: int, numbers: list[int], *, say: Callable[[str], None], keep: Path | None = None
) -> KillReport:
    """Play these loops, up to the first with a problem, whose directory is kept."""
    report = KillReport(seed)
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="adp-crash-", ignore_cleanup_errors=True, dir=keep) as folder:
            loop = Loop(report, number, Path(folder))
            try:
                await loop.run()
            except GatewayFailed as error:
                report.problems.add("gateway", str(error))
            report.loops += 1
            say(
                f"loop {number}: {loop.plan}; so far {report.kills} kills, {report.acknowledged:,} "
                f"acknowledged, {report.verified:,} looked at, {len(report.problems.texts)} problems"
            )
            if report.problems.texts:
                say(f"again: python -m crash --seed {seed} --loop {number}")
                break
    return report
