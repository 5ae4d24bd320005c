"""What a disk can do to files: flipped bits anywhere, pieces swapped, misdirected, blank or cut off.

A store with many versions, deletes and several segments is damaged behind its back, opened, and looked at.
It always has to start, and to give right bytes or a miss. One flipped bit costs at most the object whose
bytes it is in: in a journal or in the superblock it costs nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs

from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import Status
from adp_gateway.store.segments import SegmentStore

from .history import SECTOR_BYTES, History, Verdict
from .power import COMMAND_BYTES, Workload, find, record
from .problems import Problems

Files = dict[str, bytearray]
WORKLOAD_EVERY = 500  # damages to one image, then another is made
STRANGE_NAMES = ["notes.txt", "seg-00000077.data", "seg-00000078.log", "seg-4294967295.log", "seg-1.log"]


@attrs.define(eq=False)
class DamageReport:
    """All damage so far."""

    seed: int
    flips: int = 0
    others: int = 0
    looked_at: int = 0
    found: int = 0
    corrupt_items: int = 0  # told as damaged, once
    repaired: int = 0  # records, headers and superblocks put back
    problems: Problems = attrs.field(factory=Problems)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, and something was tried."""
        return not self.problems.texts and self.found > 0

    @property
    def rows(self) -> list[tuple[str, str]]:
        """What the table at the end says."""
        kinds = (*(verdict.name.lower() for verdict in Verdict), "start", "second look")
        return [
            ("seed", f"{self.seed}"),
            ("damage", f"{self.flips:,} flipped bits, {self.others:,} other"),
            ("looked at", f"{self.looked_at:,} names, {self.found:,} of them there"),
            ("told as corrupt, put back", f"{self.corrupt_items:,}, {self.repaired:,}"),
            *((kind, f"{self.problems.counts.get(kind, 0)}") for kind in kinds),
        ]


# Ways to damage files. Each says what it did.


def flip(files: Files, source: random.Random) -> str:
    """One bit anywhere; every file as often as any other, so that journals are not forgotten."""
    name = source.choice(sorted(name for name, contents in files.items() if contents))
    length = 16 if name == "superblock" else len(files[name])
    position, bit = source.randrange(length), source.randrange(8)
    files[name][position] ^= 1 << bit
    return f"bit {bit} of byte {position} of {name}"


def swap(files: Files, source: random.Random) -> str:
    """Two pieces change places."""
    size = source.choice([SECTOR_BYTES, 4096, COMMAND_BYTES])
    (one, at), (two, to) = _place(files, source, size), _place(files, source, size)
    first, second = files[one][at : at + size], files[two][to : to + size]
    files[one][at : at + size], files[two][to : to + size] = second, first
    return f"{size} bytes at {at} of {one} and at {to} of {two} swapped"


def misdirect(files: Files, source: random.Random) -> str:
    """A piece is written over another."""
    size = source.choice([SECTOR_BYTES, 4096])
    (one, at), (two, to) = _place(files, source, size), _place(files, source, size)
    piece = files[one][at : at + size]
    files[two][to : to + len(piece)] = piece
    return f"{size} bytes at {at} of {one} written to {to} of {two}"


def blank(files: Files, source: random.Random) -> str:
    """A sector comes back as zeros."""
    name, at = _place(files, source, SECTOR_BYTES)
    files[name][at : at + SECTOR_BYTES] = bytes(len(files[name][at : at + SECTOR_BYTES]))
    return f"a sector of zeros at {at} of {name}"


def cut(files: Files, source: random.Random) -> str:
    """A file is cut off."""
    name = source.choice(sorted(files))
    length = source.randrange(len(files[name]) + 1)
    del files[name][length:]
    return f"{name} cut off at {length}"


def remove(files: Files, source: random.Random) -> str:
    """A file is gone."""
    name = source.choice(sorted(files))
    del files[name]
    return f"{name} removed"


def stray(files: Files, source: random.Random) -> str:
    """A file that nobody has asked for, maybe with a name that looks like ours."""
    name = source.choice(STRANGE_NAMES)
    files[name] = bytearray(source.randbytes(source.choice([0, 100, 5000])))
    return f"a stray {name}"


OTHERS: tuple[Callable[[Files, random.Random], str], ...] = (swap, misdirect, blank, cut, remove, stray)


def _place(files: Files, source: random.Random, size: int) -> tuple[str, int]:
    """Some file and a multiple of `size` in it."""
    name = source.choice(sorted(name for name, contents in files.items() if contents))
    return name, source.randrange(-(-len(files[name]) // size)) * size


# What is found


async def examine(
    report: DamageReport, workload: Workload, files: Files, history: History, what: str, *, is_flip: bool
) -> None:
    """Open a store on the damaged files, look at every name, and once more."""
    told = f"{what}; {workload}"
    with MemoryDevice.holding(
        {name: bytes(contents) for name, contents in files.items()}, max_command_bytes=COMMAND_BYTES
    ) as device:
        try:
            async with SegmentStore.open(workload.config, device=device) as store:
                report.repaired += store.recovery.repaired_records + store.recovery.is_superblock_new
                corrupt = 0
                now = history.now()
                for name in history.names:
                    found = await find(store, name)
                    report.looked_at += 1
                    if isinstance(found, bytes):
                        report.found += 1
                        verdict = history.judge(name, found, now, now, may_evict=True)
                        if verdict is not None and (is_flip or verdict is not Verdict.PHANTOM):
                            report.problems.add(verdict.name.lower(), f"{name[1]!r}: {told}")
                    elif found != Status.NOT_FOUND:
                        corrupt += 1
                        if await find(store, name) != Status.NOT_FOUND:
                            report.problems.add("second look", f"{name[1]!r} is still there: {told}")
                    elif history.judge(name, None, now, now, may_evict=workload.may_evict or not is_flip):
                        report.problems.add("lost", f"{name[1]!r}: {told}")
                if store.stats().corrupt_objects != corrupt or (is_flip and corrupt > 1):
                    report.problems.add("second look", f"{corrupt} corrupt, counted otherwise: {told}")
                report.corrupt_items += corrupt
        except Exception as error:
            report.problems.add("start", f"{type(error).__name__}: {error}: {told}")


async def run(seed: int, flips: int, *, say: Callable[[str], None]) -> DamageReport:
    """`flips` flipped bits, and one other damage for each four of them. Stops at the first problem."""
    report = DamageReport(seed)
    number = seed
    while report.flips < flips and report.problems.texts == []:
        workload = attrs.evolve(Workload.draw(number), durability="relaxed", has_quotas=False)
        recorded = await record(workload)
        with recorded.device:
            files = recorded.device.contents()
        source = random.Random(f"{seed} {number}")
        for _ in range(min(WORKLOAD_EVERY, flips - report.flips)):
            report.flips += 1
            ways = [flip] if source.random() < 0.8 else [flip, source.choice(OTHERS)]
            for way in ways:
                damaged = {name: bytearray(contents) for name, contents in files.items()}
                what = way(damaged, source)
                report.others += way is not flip
                await examine(report, workload, damaged, recorded.history, what, is_flip=way is flip)
            if report.problems.texts:
                break
        number += 1
        say(f"{workload}: {report.flips:,} bits flipped so far, {report.others:,} other damages")
    return report
