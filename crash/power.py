"""Power cuts at every command of a simulated device, with everything that may then be left of it.

A workload of puts, overwrites, deletes, evictions, relocations, segments that fill and are trimmed, and
quotas runs on a device in memory, which records every command. For a cut behind any of them, a fate is drawn
for what was not synced; a store is opened on what is left, and every name is looked at. Then the opened store
goes on a little, and its power is cut too.

`durable` has to keep everything at every cut. `relaxed` has to at every kill, where all commands that have
returned survive; after a power cut it may have lost or brought back anything, but never bytes that were not
written under their name.
"""

from __future__ import annotations

import enum
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import anyio
import attrs
import xxhash

from adp_gateway.config import StoreConfig
from adp_gateway.device.memory import Command, Kind, MemoryDevice, apply
from adp_gateway.fsck import check_device
from adp_gateway.store.base import PutItem, Status
from adp_gateway.store.quotas import Account
from adp_gateway.store.segments import SegmentStore

from .history import SECTOR_BYTES, History, Name, Verdict
from .problems import Problems

KIB = 1 << 10
COMMAND_BYTES = 16 * KIB
NAMESPACES = (bytes(range(32)), bytes(range(1, 33)))
SIZES = (0, 1, 700, 5000, COMMAND_BYTES - 1, COMMAND_BYTES, COMMAND_BYTES + 1, 30_000, 55_000)
WRITERS = 5
NAMES_PER_WRITER = 4
SLOWEST_SECONDS = 0.008


class Fate(enum.Enum):
    """What becomes of commands that were not synced. A kill is `EVERYTHING`: the kernel lives on."""

    NOTHING = "none of them"
    EVERYTHING = "all of them"
    SUBSET = "some of them"
    LATEST = "the last few and not those before"
    TORN = "any sectors of any of them"
    SHUFFLED = "any sectors of any of them, in another order"


@attrs.frozen(kw_only=True)
class Workload:
    """What is done to the store that will lose its power."""

    seed: int
    durability: str
    is_roomy: bool
    has_quotas: bool
    rounds: int

    @classmethod
    def draw(cls, seed: int) -> Workload:
        """Of every kind in turn."""
        source = random.Random(f"workload {seed}")
        return cls(
            seed=seed,
            durability="relaxed" if seed % 4 == 3 else "durable",
            is_roomy=seed % 3 == 0,
            has_quotas=source.random() < 0.3,
            rounds=source.randint(8, 20),
        )

    @property
    def config(self) -> StoreConfig:
        accounts = [
            Account(name=f"account {number}", prefix=namespace[:8], quota_bytes=150_000)
            for number, namespace in enumerate(NAMESPACES)
        ]
        return StoreConfig(
            directory="unused",
            capacity_bytes=(4096 if self.is_roomy else 320) * KIB,
            segment_bytes=64 * KIB,
            max_command_bytes=COMMAND_BYTES,
            io_threads=2,
            durability="durable" if self.durability == "durable" else "relaxed",
            accounts=tuple(accounts) if self.has_quotas else (),
        )

    @property
    def may_evict(self) -> bool:
        return not self.is_roomy or self.has_quotas

    def __str__(self) -> str:
        room = "roomy" if self.is_roomy else "tight"
        return f"workload {self.seed} ({self.durability}, {room}{', quotas' if self.has_quotas else ''})"


def names_of(writer: int) -> list[Name]:
    """The names that a writer owns."""
    return [
        (NAMESPACES[number % 2], b"writer-%d-object-%d" % (writer, number) + b"\xa5" * 20)
        for number in range(NAMES_PER_WRITER)
    ]


async def work(store: SegmentStore, history: History, workload: Workload) -> None:
    """Several writers at once, each in its own names."""
    async with anyio.create_task_group() as tasks:
        for writer in range(WRITERS):
            source = random.Random(f"{workload.seed} {writer}")
            tasks.start_soon(_write, store, history, source, names_of(writer), workload.rounds)


async def _write(
    store: SegmentStore, history: History, source: random.Random, names: list[Name], rounds: int
) -> None:
    for _ in range(rounds):
        name = source.choice(names)
        beside = [other for other in names if other[0] == name[0]]
        roll = source.random()
        if roll < 0.65:
            await put(store, history, source.sample(beside, source.randint(1, len(beside))), source)
        elif roll < 0.85:
            await delete(store, history, [name])
        else:
            await find(store, name)  # what has been read gets a second chance


async def put(store: SegmentStore, history: History, names: Sequence[Name], source: random.Random) -> None:
    """Put new versions of names of one namespace."""
    steps = [history.write(name, source.choice(SIZES)) for name in names]
    items = [
        PutItem(key=name[1], checksum=xxhash.xxh3_64_intdigest(data), data=memoryview(data))
        for name, (_, data) in zip(names, steps, strict=True)
    ]
    statuses = await store.put_many(names[0][0], items)
    for name, (step, _), status in zip(names, steps, statuses, strict=True):
        if status == Status.OK:
            history.acknowledge(step)
        else:
            history.withdraw(name, step)


async def delete(store: SegmentStore, history: History, names: Sequence[Name]) -> None:
    """Delete names of one namespace."""
    steps = [history.delete(name) for name in names]
    statuses = await store.delete_many(names[0][0], [name[1] for name in names])
    for step, status in zip(steps, statuses, strict=True):
        if status in (Status.OK, Status.NOT_FOUND):
            history.acknowledge(step)


async def find(store: SegmentStore, name: Name) -> bytes | Status:
    """The object's bytes, or why there are none."""
    (lease,) = store.open_read(name[0], [name[1]])
    if lease is None:
        return Status.NOT_FOUND
    try:
        buffer = memoryview(bytearray(lease.length))
        (status,) = await store.read_into([lease], [buffer])
        return bytes(buffer) if status == Status.OK else Status(status)
    finally:
        lease.release()


@attrs.frozen
class Recorded:
    """A workload that has been run, up to its last acknowledgement."""

    workload: Workload
    device: MemoryDevice
    history: History
    count: int  # of commands


async def record(workload: Workload) -> Recorded:
    """Run it. The device is the caller's to discard.

    Its commands take different times, so that the writers overtake each other as they would on a real one.
    """
    source = random.Random(f"{workload.seed} times")
    device = MemoryDevice(
        max_command_bytes=COMMAND_BYTES,
        before=lambda _command: time.sleep(source.random() ** 4 * SLOWEST_SECONDS),
    )
    history = History(lambda: len(device.commands))
    async with SegmentStore.open(workload.config, device=device) as store:
        await work(store, history, workload)
        count = len(device.commands)
    return Recorded(workload, device, history, count)


# What is left


def after(device: MemoryDevice, count: int, fate: Fate, source: random.Random) -> MemoryDevice:
    """The device as it may be when the power goes behind its first `count` commands.

    What was synced is there, and in order. A write is torn at sectors of 512 bytes.
    """
    files = {name: bytearray(contents) for name, contents in device.origin.items()}
    for command, pieces in _survivors(device.commands[:count], fate, source):
        if command.kind is Kind.CREATE:
            files[command.name] = bytearray()
        elif command.kind is Kind.REMOVE:
            files.pop(command.name, None)
        elif command.name in files:
            for start, stop in pieces:
                part = attrs.evolve(
                    command,
                    position=command.position + start,
                    data=command.data[start:stop],
                    length=stop - start,
                )
                apply(part, files[command.name], stop - start)
    return MemoryDevice.holding(
        {name: bytes(contents) for name, contents in files.items()}, max_command_bytes=COMMAND_BYTES
    )


Pieces = list[tuple[int, int]]
_NAMES = (Kind.CREATE, Kind.REMOVE)
_CHANGES = (*_NAMES, Kind.WRITE, Kind.ALLOCATE, Kind.TRUNCATE)


def _survivors(
    commands: Sequence[Command], fate: Fate, source: random.Random
) -> Iterator[tuple[Command, Pieces]]:
    names_synced = max((i for i, c in enumerate(commands) if c.kind is Kind.SYNC_NAMES), default=-1)
    synced = {command.name: i for i, command in enumerate(commands) if command.kind is Kind.SYNC}
    safe: list[tuple[Command, Pieces]] = []
    loose: list[Command] = []
    for i, command in enumerate(commands):
        if command.kind not in _CHANGES:
            continue
        is_of_names = command.kind in _NAMES
        if i < (names_synced if is_of_names else synced.get(command.name, -1)):
            safe.append((command, [(0, command.length)]))
        else:
            loose.append(command)
    # Names and contents do not wait for each other, so what is safe may be done first: only the order of the
    # commands of one file, and of those of one name, can matter, and a sync covers a beginning of each.
    first_loose = source.randrange(len(loose) + 1)
    kept = [
        (command, pieces)
        for number, command in enumerate(loose)
        if (pieces := _pieces(command, fate, source, is_late=number >= first_loose))
    ]
    if fate is Fate.SHUFFLED:
        kept = _shuffled(kept, source)
    yield from safe
    yield from kept


def _pieces(command: Command, fate: Fate, source: random.Random, *, is_late: bool) -> Pieces:
    whole = [(0, command.length)]
    if fate is Fate.NOTHING:
        return []
    if fate is Fate.EVERYTHING:
        return whole
    if fate is Fate.LATEST:
        return whole if is_late else []
    if fate is Fate.SUBSET or command.kind is not Kind.WRITE:
        return whole if source.random() < 0.5 else []
    edges = [0]
    while edges[-1] < command.length:
        sector = (command.position + edges[-1]) // SECTOR_BYTES + 1
        edges.append(min(command.length, sector * SECTOR_BYTES - command.position))
    share = source.choice([0.1, 0.5, 0.9])
    return [piece for piece in itertools.pairwise(edges) if source.random() < share]


def _shuffled(kept: list[tuple[Command, Pieces]], source: random.Random) -> list[tuple[Command, Pieces]]:
    """Writes trade places with writes; what changes lengths or names stays where it is among them."""
    out: list[tuple[Command, Pieces]] = []
    run: list[tuple[Command, Pieces]] = []
    for entry in kept:
        if entry[0].kind is Kind.WRITE:
            run.append(entry)
            continue
        source.shuffle(run)
        out += [*run, entry]
        run = []
    source.shuffle(run)
    return out + run


# What is found


@attrs.define(eq=False)
class PowerReport:
    """All cuts so far."""

    seed: int
    workloads: int = 0
    commands: int = 0
    cuts: int = 0
    second_cuts: int = 0
    looked_at: int = 0
    found: int = 0
    problems: Problems = attrs.field(factory=Problems)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, and something was tried."""
        return not self.problems.texts and self.found > 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        return [
            ("seed", f"{self.seed}"),
            ("workloads", f"{self.workloads}, {self.commands:,} device commands"),
            ("power cuts", f"{self.cuts:,}, and {self.second_cuts:,} of what had been opened after one"),
            ("looked at", f"{self.looked_at:,} names, {self.found:,} of them there"),
            *(
                (verdict.name.lower(), f"{self.problems.counts.get(verdict.name.lower(), 0)}")
                for verdict in Verdict
            ),
            ("check", f"{self.problems.counts.get('check', 0)}"),
            ("capacity", f"{self.problems.counts.get('capacity', 0)}"),
        ]


@attrs.frozen(kw_only=True)
class Cut:
    """One cut: where, and what was left."""

    workload: Workload
    count: int
    fate: Fate
    seed: str

    @property
    def is_strict(self) -> bool:
        """Whether everything has to be kept."""
        return self.workload.durability == "durable" or self.fate is Fate.EVERYTHING

    def __str__(self) -> str:
        fate = f"{self.fate.value} survives, drawn from {self.seed!r}"
        return f"{self.workload}, cut behind command {self.count}, {fate}"


async def examine(
    report: PowerReport, cut: Cut, image: MemoryDevice, history: History, *, goes_on: bool
) -> None:
    """Open a store on what is left and look at every name; then go on with it, and cut again."""
    workload = cut.workload
    observed: dict[Name, bytes | None] = {}

    async with SegmentStore.open(workload.config, device=image) as store:
        stats = store.stats()
        if not image.used_bytes() <= stats.used_bytes <= stats.capacity_bytes:
            report.problems.add("capacity", f"{image.used_bytes()}, {stats.used_bytes}: {cut}")
        for name in history.names:
            found = await find(store, name)
            report.looked_at += 1
            if isinstance(found, bytes):
                report.found += 1
            elif found != Status.NOT_FOUND and cut.is_strict:
                report.problems.add("corrupt", f"{name[1]!r}: {found.name}; {cut}")
                continue
            observed[name] = found if isinstance(found, bytes) else None
            verdict = _judged(history, name, observed[name], cut)
            if verdict is not None:
                allowed = history.tell(name, cut.count, cut.count)
                report.problems.add(verdict.name.lower(), f"{name[1]!r}, allowed {allowed}; {cut}")
        later = history.fork(lambda: len(image.commands), observed, cut.count, may_evict=workload.may_evict)
        source = random.Random(f"{cut.seed} goes on")
        if goes_on:
            there = [name for name, found in observed.items() if found is not None] or history.names
            await delete(store, later, [source.choice(there)])
            await put(store, later, [source.choice(history.names)], source)
            await delete(store, later, [source.choice(there)])
        count = len(image.commands)
    if not (checked := check_device(image)).is_clean and cut.is_strict:
        report.problems.add("check", f"{'; '.join(map(str, checked.problems))}; {cut}")
    if goes_on:
        for _ in range(2):
            second = attrs.evolve(
                cut,
                count=source.randrange(count + 1),
                fate=source.choice(list(Fate)),
                seed=f"{cut.seed} again",
            )
            if not cut.is_strict or not second.is_strict:
                continue
            with after(image, second.count, second.fate, source) as left:
                report.second_cuts += 1
                await examine(report, second, left, later, goes_on=False)


def _judged(history: History, name: Name, found: bytes | None, cut: Cut) -> Verdict | None:
    if cut.is_strict:
        return history.judge(name, found, cut.count, cut.count, may_evict=cut.workload.may_evict)
    verdict = None if found is None else history.identify(name, found)
    return None if verdict is Verdict.PHANTOM else verdict


async def run(seed: int, cuts: int, *, say: Callable[[str], None], stop_at: int = 1) -> PowerReport:
    """`cuts` cuts altogether: each workload is cut behind every command, with a few fates each."""
    report = PowerReport(seed)
    number = seed
    while report.cuts < cuts and len(report.problems.texts) < stop_at:
        recorded = await record(Workload.draw(number))
        with recorded.device:
            await cut_everywhere(report, recorded, most=cuts - report.cuts, stop_at=stop_at)
        number += 1
        say(f"{recorded.workload}: {recorded.count} commands; {report.cuts:,} cuts so far")
    return report


async def cut_everywhere(
    report: PowerReport, recorded: Recorded, *, most: int, step: int = 1, stop_at: int = 1
) -> None:
    """Behind every `step`th command: all, nothing, and one fate that is drawn."""
    report.workloads += 1
    report.commands += recorded.count
    for count in range(0, recorded.count + 1, step):
        seed = f"{recorded.workload.seed} {count}"
        source = random.Random(seed)
        others = [fate for fate in Fate if fate not in (Fate.NOTHING, Fate.EVERYTHING)]
        for fate in (Fate.EVERYTHING, Fate.NOTHING, source.choice(others)):
            if most <= 0 or len(report.problems.texts) >= stop_at:
                return
            most -= 1
            cut = Cut(workload=recorded.workload, count=count, fate=fate, seed=seed)
            with after(recorded.device, count, fate, source) as image:
                report.cuts += 1
                await examine(report, cut, image, recorded.history, goes_on=source.random() < 0.5)
