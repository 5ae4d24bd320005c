"""Section 5.14, feature REGIONS: memory that client and gateway share, and what neither may do to the other.

Tried where descriptors travel: on a Unix socket, and in memory. What the spec leaves undefined is not looked
at: the rest of a target, and a target whose item is not OK. Everything around the targets is.
"""

import fcntl
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from adp_client.protocol.constants import ErrorCode, Feature, Opcode
from adp_client.protocol.messages import (
    Ping,
    ReadRegion,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    WriteRegion,
)
from adp_client.transport.base import local_transport

from .clause import Broken, Chapter, Level, expect
from .frames import frame
from .peer import Answer, ConnectionEnded, Peer, checksum_of
from .trial import Trial, content

REGIONS: Chapter[Trial] = Chapter()

OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT
STALE_EPOCH, REFUSED, TOO_LARGE = ErrorCode.STALE_EPOCH, ErrorCode.REFUSED, ErrorCode.TOO_LARGE

_END = 1 << 64
_FILLER = b"\xee"
_ITEMS = 9  # the most that one request of this chapter names
_BYTES = 4096  # the most that an object of this chapter has, unless its clause looks at the limits itself

Target: TypeAlias = tuple[int, int, int]  # region, offset, capacity
Source: TypeAlias = tuple[int, int, bytes]  # region, offset, what is there


class Memory:
    """A file in memory that is shared with the gateway, full of one byte at first."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self.fill()

    def fill(self) -> None:
        """As it was at first."""
        os.pwrite(self.fd, _FILLER * self.size_bytes, 0)

    def put(self, offset: int, data: bytes) -> None:
        """Write there, as its owner."""
        os.pwrite(self.fd, data, offset)

    def take(self, offset: int, length: int) -> bytes:
        """What is there."""
        return os.pread(self.fd, length, offset)

    def expect_untouched(self, *targets: Target) -> None:
        """Raise Broken unless everything outside of these targets is as it was at first."""
        found = bytearray(self.take(0, self.size_bytes))
        for _, offset, capacity in targets:
            found[offset : offset + capacity] = _FILLER * len(found[offset : offset + capacity])
        for at, byte in enumerate(found):
            if byte != _FILLER[0]:
                raise Broken(f"byte {at}, outside of every target: expected {_FILLER[0]}, got {byte}")


@contextmanager
def _memory(trial: Trial, size_bytes: int) -> Iterator[Memory]:
    trial.need(hasattr(os, "memfd_create"), "this system has no files in memory")
    fd = os.memfd_create("adp-conformance", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        yield Memory(fd, size_bytes)
    finally:
        os.close(fd)


async def _connect(trial: Trial, features: Feature = Feature.REGIONS, **hello: object) -> Peer:
    trial.need(
        trial.limits.max_items >= _ITEMS and trial.largest_bytes >= _BYTES,
        f"the limits leave no room for {_ITEMS} objects of {_BYTES} bytes in one request",
    )
    peer = await trial.connect(features=Feature.FRAGMENTS | features, **hello)
    trial.need(local_transport(peer.transport) is not None, "the transport carries no descriptors")
    return peer


async def _open(peer: Peer, number: int, size_bytes: int, fd: int) -> ErrorCode:
    request_id, raw = peer.say(RegionOpen(region=number, region_bytes=size_bytes))
    await peer.send_with_descriptor(raw, fd)
    return (await peer.answer(request_id)).status


async def _share(peer: Peer, memory: Memory, *, number: int = 1, size_bytes: int | None = None) -> None:
    """`_open`, which must succeed."""
    size_bytes = memory.size_bytes if size_bytes is None else size_bytes
    expect("REGION_OPEN", OK, await _open(peer, number, size_bytes, memory.fd))


async def _close(peer: Peer, number: int = 1) -> ErrorCode:
    return (await peer.call(RegionClose(region=number))).status


def _reading(trial: Trial, keys: Sequence[bytes], targets: Sequence[Target]) -> ReadRegion:
    return ReadRegion(
        namespace=trial.namespace,
        keys=tuple(keys),
        targets=tuple(RegionTarget(region=r, offset=o, capacity=c) for r, o, c in targets),
    )


async def _read(trial: Trial, peer: Peer, keys: Sequence[bytes], targets: Sequence[Target]) -> Answer:
    return await peer.call(_reading(trial, keys, targets))


async def _write(
    trial: Trial, peer: Peer, keys: Sequence[bytes], sources: Sequence[Source], *, flaw: int = 0
) -> list[ErrorCode]:
    """WRITE_REGION of what is said to be in the sources, with checksums that are off by `flaw`."""
    trial.will_remove(*keys)
    message = WriteRegion(
        namespace=trial.namespace,
        keys=tuple(keys),
        sources=tuple(
            RegionSource(region=r, offset=o, length=len(data), checksum=checksum_of(data) ^ flaw)
            for r, o, data in sources
        ),
    )
    return (await peer.call(message)).statuses


def _sizes(trial: Trial) -> list[int]:
    most = min(trial.largest_bytes, trial.limits.max_inflight_bytes // 16)
    return [size for size in (1, 2, 4095, 4096, 4097, 65_537, 300_000) if size <= most]


# ---------------------------------------------------------------- moving objects


@REGIONS.clause("5.14-read", level=Level.FULL, needs=Feature.REGIONS)
async def read(trial: Trial) -> None:
    """READ_REGION puts all of each object at its target's offset, and touches nothing outside of targets."""
    objects = [content(size, seed) for seed, size in enumerate(_sizes(trial))]
    keys = trial.keys(len(objects))
    for features in (Feature.REGIONS, Feature.REGIONS | Feature.END_TO_END):
        peer = await _connect(trial, features)
        for pair in zip(keys, objects, strict=True):
            await trial.store(peer, [pair])
        targets: list[Target] = []
        end = 3
        for number, data in enumerate(objects):  # every other one has more room than it needs
            targets.append((0xFFFFFFFF, end, len(data) + number % 2 * 10))
            end += targets[-1][2] + 5
        with _memory(trial, end + 100) as memory:
            await _share(peer, memory, number=0xFFFFFFFF, size_bytes=end)
            answer = await _read(trial, peer, keys, targets)
            expect("READ_REGION", [OK] * len(objects), answer.statuses)
            for number, data in enumerate(objects):
                row, offset = answer.items[number], targets[number][1]
                expect("the checksum of an object", checksum_of(data), row.checksum)
                expect("the object bytes of an object", len(data), row.object_bytes)
                expect(f"the memory at {offset}", data, memory.take(offset, len(data)))
            memory.expect_untouched(*targets)


@REGIONS.clause("5.14-write", level=Level.FULL, needs=Feature.REGIONS)
async def write(trial: Trial) -> None:
    """WRITE_REGION stores the bytes of each source, and replaces what was there; READ brings them."""
    objects = [content(size, seed) for seed, size in enumerate(_sizes(trial))]
    keys = trial.keys(len(objects))
    peer = await _connect(trial)
    await trial.store(peer, [(keys[0], content(_BYTES, 99))])
    sources: list[Source] = []
    end = 3
    for data in objects:
        sources.append((0, end, data))
        end += len(data) + 5
    with _memory(trial, end) as memory:
        await _share(peer, memory, number=0)
        for _, offset, data in sources:
            memory.put(offset, data)
        expect("WRITE_REGION", [OK] * len(keys), await _write(trial, peer, keys, sources))
        memory.fill()
        await trial.expect_objects(peer, list(zip(keys, objects, strict=True)))


@REGIONS.clause("5.14-empty", level=Level.FULL, needs=Feature.REGIONS)
async def empty(trial: Trial) -> None:
    """An object of 0 bytes goes in and out of a region like any other, at its very end too."""
    keys = trial.keys(2)
    peer = await _connect(trial)
    with _memory(trial, 100) as memory:
        await _share(peer, memory)
        statuses = await _write(trial, peer, keys, [(1, 50, b""), (1, 100, b"")])
        expect("WRITE_REGION of empty objects", [OK, OK], statuses)
        await trial.expect_objects(peer, [(key, b"") for key in keys])
        targets = [(1, 100, 0), (1, 50, 0)]
        answer = await _read(trial, peer, keys, targets)
        expect("READ_REGION of empty objects", [OK, OK], answer.statuses)
        expect("the checksum of nothing", checksum_of(b""), answer.items[0].checksum)
        memory.expect_untouched()


@REGIONS.clause("5.14-not-found", level=Level.FULL, needs=Feature.REGIONS)
async def not_found(trial: Trial) -> None:
    """READ_REGION of what is not there is NOT_FOUND in its place, and the others come."""
    keys = trial.keys(5)
    peer = await _connect(trial)
    there = {key: content(100, number) for number, key in enumerate(keys) if number % 2}
    await trial.store(peer, there.items())
    targets = [(1, 200 * number + 50, 100) for number in range(len(keys))]
    with _memory(trial, 1000) as memory:
        await _share(peer, memory)
        answer = await _read(trial, peer, keys, targets)
        expect("READ_REGION", [OK if key in there else NOT_FOUND for key in keys], answer.statuses)
        for key, (_, offset, _) in zip(keys, targets, strict=True):
            if key in there:
                expect(f"the memory at {offset}", there[key], memory.take(offset, 100))
        memory.expect_untouched(*targets)


@REGIONS.clause("5.14-too-large", level=Level.FULL, needs=Feature.REGIONS)
async def too_large(trial: Trial) -> None:
    """An object larger than its target is TOO_LARGE, with its size, and nothing lands beyond the target."""
    big, small = trial.keys(2)
    peer = await _connect(trial)
    await trial.store(peer, [(big, content(1000)), (small, content(100))])
    with _memory(trial, 5000) as memory:
        await _share(peer, memory)
        for capacity in (999, 0):
            targets = [(1, 100, capacity), (1, 3000, 100)]
            answer = await _read(trial, peer, [big, small], targets)
            expect(f"READ_REGION of 1000 bytes into {capacity}", [TOO_LARGE, OK], answer.statuses)
            expect("the size that goes with TOO_LARGE", 1000, answer.items[0].object_bytes)
            expect("the memory of the other", content(100), memory.take(3000, 100))
            memory.expect_untouched(*targets)
            memory.fill()


@REGIONS.clause("5.14-small-frames", level=Level.FULL, needs=Feature.REGIONS)
async def small_frames(trial: Trial) -> None:
    """The reply to READ_REGION comes in frames that the client can receive."""
    keys = trial.keys(_ITEMS)
    peer, writer = await _connect(trial, max_body_bytes=64), await _connect(trial)
    await trial.store(writer, [(key, content(100, number)) for number, key in enumerate(keys) if number])
    with _memory(trial, 100 * _ITEMS) as memory:
        await _share(peer, memory)
        answer = await _read(trial, peer, keys, [(1, 100 * number, 100) for number in range(_ITEMS)])
        expect("READ_REGION", [NOT_FOUND] + [OK] * (_ITEMS - 1), answer.statuses)
        for number in range(1, _ITEMS):
            expect("the memory of an object", content(100, number), memory.take(100 * number, 100))


@REGIONS.clause("5.14-corrupt", level=Level.FULL, needs=Feature.REGIONS)
async def corrupt(trial: Trial) -> None:
    """WRITE_REGION of bytes that do not match their checksum is CORRUPT, and stores nothing of them."""
    absent, present = trial.keys(2)
    peer = await _connect(trial)
    await trial.store(peer, [(present, content(1000, 1))])
    with _memory(trial, 1000) as memory:
        await _share(peer, memory)
        memory.put(0, content(1000, 2))
        sources = [(1, 0, content(1000, 2))] * 2
        statuses = await _write(trial, peer, [absent, present], sources, flaw=1)
        expect("WRITE_REGION with a wrong checksum", [CORRUPT, CORRUPT], statuses)
        await trial.expect_objects(peer, [(absent, None), (present, content(1000, 1))])


@REGIONS.clause("5.14-unknown-region", level=Level.FULL, needs=Feature.REGIONS)
async def unknown_region(trial: Trial) -> None:
    """An item in a region that this connection does not have is STALE_EPOCH, and the others are served."""
    keys = trial.keys(3)
    peer = await _connect(trial)
    await trial.store(peer, [(key, content(100, number)) for number, key in enumerate(keys)])
    with _memory(trial, 1000) as memory:
        await _share(peer, memory)
        answer = await _read(trial, peer, keys, [(1, 0, 100), (2, 200, 100), (1, 400, 100)])
        expect("READ_REGION into regions 1, 2 and 1", [OK, STALE_EPOCH, OK], answer.statuses)
        for number, offset in ((0, 0), (2, 400)):
            expect(f"the memory at {offset}", content(100, number), memory.take(offset, 100))
        memory.expect_untouched((1, 0, 100), (1, 400, 100))
        new = content(100, 7)
        memory.put(600, new)
        statuses = await _write(trial, peer, keys, [(1, 600, new), (0, 600, new), (1, 600, new)])
        expect("WRITE_REGION out of regions 1, 0 and 1", [OK, STALE_EPOCH, OK], statuses)
        await trial.expect_objects(peer, list(zip(keys, [new, content(100, 1), new], strict=True)))


@REGIONS.clause("5.14-bounds", level=Level.FULL, needs=Feature.REGIONS)
async def bounds(trial: Trial) -> None:
    """An item that does not lie within its region is REFUSED, also near 2^64, and the others are served."""
    places = [(0, 100), (900, 100), (901, 100), (1000, 1), (1001, 0), (_END - 1, 1), (_END - 100, 100)]
    places += [(_END - 50, 100), (1 << 63, 100)]
    wanted = [OK, OK] + [REFUSED] * 7
    keys = trial.keys(len(places))
    peer = await _connect(trial)
    old = [content(min(length, 100), number) for number, (_, length) in enumerate(places)]
    await trial.store(peer, zip(keys, old, strict=True))
    with _memory(trial, 2000) as memory:  # more than is shared
        await _share(peer, memory, size_bytes=1000)
        targets = [(1, offset, length) for offset, length in places]
        answer = await _read(trial, peer, keys, targets)
        expect("READ_REGION at the bounds", wanted, answer.statuses)
        for number in range(2):
            expect("the memory of an item within", old[number], memory.take(places[number][0], 100))
        memory.expect_untouched(*targets[:2])
        memory.fill()
        sources = [(1, offset, _FILLER * length) for offset, length in places]
        statuses = await _write(trial, peer, keys, sources)
        expect("WRITE_REGION at the bounds", wanted, statuses)
        stored = [_FILLER * 100] * 2 + old[2:]
        await trial.expect_objects(peer, list(zip(keys, stored, strict=True)))


@REGIONS.clause("5.14-shrunk", level=Level.FULL, needs=Feature.REGIONS)
async def shrunk(trial: Trial) -> None:
    """A region whose file was cut off is REFUSED for the items that this hits; nothing else suffers."""
    page = mmap.PAGESIZE
    keys, new = trial.keys(8)[:4], trial.keys(8)[4:]
    peer, bystander = await _connect(trial), await _connect(trial)
    trial.need(page <= trial.largest_bytes, "no object may be as large as a page of memory")
    objects = [content(page, number) for number in range(4)]
    for pair in zip(keys, objects, strict=True):
        await trial.store(peer, [pair])
    targets = [(1, page * number, page) for number in range(4)]
    with _memory(trial, 4 * page) as memory, _memory(trial, 4 * page) as healthy:
        await _share(peer, memory)
        await _share(bystander, healthy)
        for left in (2, 0):
            os.ftruncate(memory.fd, left * page)
            wanted = [OK] * left + [REFUSED] * (4 - left)
            answer = await _read(trial, peer, keys, targets)
            expect(f"READ_REGION when {left} of 4 pages are left", wanted, answer.statuses)
            for number in range(left):
                expect("the memory that is left", objects[number], memory.take(page * number, page))
            sources = [(1, page * number, objects[number]) for number in range(4)]
            statuses = await _write(trial, peer, new, sources)
            expect(f"WRITE_REGION when {left} of 4 pages are left", wanted, statuses)
        for each, file in ((bystander, healthy), (peer, memory)):
            os.ftruncate(file.fd, 4 * page)
            answer = await _read(trial, each, keys, targets)
            expect("READ_REGION into memory that is there", [OK] * 4, answer.statuses)
            expect("what that brings", b"".join(objects), file.take(0, 4 * page))
        kept = zip(new, [*objects[:2], None, None], strict=True)
        await trial.expect_objects(bystander, list(kept))


# ---------------------------------------------------------------- opening and closing


@contextmanager
def _unfit(size_bytes: int) -> Iterator[dict[str, int]]:
    """Descriptors that are not of a file in memory, to read and write."""
    fds: dict[str, int] = {}
    other_end = -1
    fd = os.memfd_create("adp-conformance", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        fds["a file in memory that is only to be read"] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        fds["the end of a pipe"], other_end = os.pipe()
        fds["/dev/zero"] = os.open("/dev/zero", os.O_RDWR)
        with tempfile.TemporaryFile() as file:
            file.truncate(size_bytes)
            try:
                fcntl.fcntl(file.fileno(), fcntl.F_GET_SEALS)
            except OSError:  # else: temporary files are in memory here
                fds["a file on a disk"] = os.dup(file.fileno())
        yield fds
    finally:
        for each in (fd, other_end, *fds.values()):
            if each >= 0:
                os.close(each)


@REGIONS.clause("5.14-open-refused", level=Level.FULL, needs=Feature.REGIONS)
async def open_refused(trial: Trial) -> None:
    """REGION_OPEN of 0 bytes, of more than the file has, or of no memory file is REFUSED; all goes on."""
    peer = await _connect(trial)
    with _memory(trial, 4096) as memory:
        for size in (0, 4097, 1 << 63, _END - 1):
            got = await _open(peer, 1, size, memory.fd)
            expect(f"REGION_OPEN of {size} bytes of a file of 4096", REFUSED, got)
        with _unfit(4096) as fds:
            for name, fd in fds.items():
                expect(f"REGION_OPEN with {name}", REFUSED, await _open(peer, 1, 4096, fd))
        expect("REGION_CLOSE of what was refused", STALE_EPOCH, await _close(peer))
        await _share(peer, memory)


@REGIONS.clause("5.14-open-twice", level=Level.FULL, needs=Feature.REGIONS)
async def open_twice(trial: Trial) -> None:
    """REGION_OPEN of a number that is in use is REFUSED, and the region of that number stays what it is."""
    (key,) = trial.keys(1)
    peer = await _connect(trial)
    await trial.store(peer, [(key, content(100))])
    with _memory(trial, 4096) as first, _memory(trial, 4096) as second:
        await _share(peer, first)
        expect("REGION_OPEN of a number in use", REFUSED, await _open(peer, 1, 4096, second.fd))
        expect("READ_REGION after that", [OK], (await _read(trial, peer, [key], [(1, 0, 100)])).statuses)
        expect("the memory that is shared", content(100), first.take(0, 100))
        second.expect_untouched()


@REGIONS.clause("5.14-close", level=Level.FULL, needs=Feature.REGIONS)
async def close(trial: Trial) -> None:
    """After REGION_CLOSE its items are STALE_EPOCH, so is another REGION_CLOSE, and the number is free."""
    key, other = trial.keys(2)
    peer = await _connect(trial)
    await trial.store(peer, [(key, content(100))])
    with _memory(trial, 4096) as first, _memory(trial, 4096) as second:
        expect("REGION_CLOSE of none", STALE_EPOCH, await _close(peer))
        await _share(peer, first)
        expect("REGION_CLOSE", OK, await _close(peer))
        answer = await _read(trial, peer, [key], [(1, 0, 100)])
        expect("READ_REGION into a region that was closed", [STALE_EPOCH], answer.statuses)
        statuses = await _write(trial, peer, [other], [(1, 0, _FILLER * 100)])
        expect("WRITE_REGION out of a region that was closed", [STALE_EPOCH], statuses)
        expect("REGION_CLOSE again", STALE_EPOCH, await _close(peer))
        await trial.expect_objects(peer, [(other, None)])
        await _share(peer, second)
        answer = await _read(trial, peer, [key], [(1, 0, 100)])
        expect("READ_REGION into the new region", [OK], answer.statuses)
        expect("the memory of the new region", content(100), second.take(0, 100))
        first.expect_untouched()


@REGIONS.clause("5.14-close-waits", level=Level.FULL, needs=Feature.REGIONS)
async def close_waits(trial: Trial) -> None:
    """When REGION_CLOSE is answered, what is OK is in place, and the gateway writes there no more."""
    peer = await _connect(trial)
    size = min(262_144, trial.largest_bytes, trial.limits.max_inflight_bytes // _ITEMS // 2)
    keys = trial.keys(_ITEMS)
    for number, key in enumerate(keys):
        await trial.store(peer, [(key, content(size, number))])
    targets = [(1, size * number, size) for number in range(_ITEMS)]
    with _memory(trial, size * _ITEMS) as memory:
        await _share(peer, memory)
        read_id = await peer.ask(_reading(trial, keys, targets))
        close_id = await peer.ask(RegionClose(region=1))
        expect("REGION_CLOSE after READ_REGION", OK, (await peer.answer(close_id)).status)
        found = [memory.take(offset, size) for _, offset, _ in targets]
        memory.fill()
        statuses = (await peer.answer(read_id)).statuses
        for number, status in enumerate(statuses):
            if status is OK:
                expect(
                    "the memory of an item that is OK, at REGION_CLOSE's reply",
                    content(size, number),
                    found[number],
                )
            else:  # the two ran side by side
                expect("an item that is not OK", STALE_EPOCH, status)
        await trial.ping(peer)
        memory.expect_untouched()


@REGIONS.clause("5.14-own", level=Level.FULL, needs=Feature.REGIONS)
async def own(trial: Trial) -> None:
    """Regions belong to their connection: on another, and on the next, their numbers are STALE_EPOCH."""
    key, other_key = trial.keys(2)
    holder, other = await _connect(trial), await _connect(trial)
    await trial.store(holder, [(key, content(100))])
    with _memory(trial, 4096) as memory, _memory(trial, 4096) as second:
        await _share(holder, memory)
        await _expect_none(trial, other, key, other_key)
        await _share(other, second)
        memory.expect_untouched()
        answer = await _read(trial, other, [key], [(1, 0, 100)])
        expect("READ_REGION into a region of one's own", [OK], answer.statuses)
        expect("the memory of that region", content(100), second.take(0, 100))
        memory.expect_untouched()
        await holder.leave()
        await holder.transport.aclose()
        await _expect_none(trial, await _connect(trial), key, other_key)


async def _expect_none(trial: Trial, peer: Peer, key: bytes, other_key: bytes) -> None:
    answer = await _read(trial, peer, [key], [(1, 0, 100)])
    expect("READ_REGION into another connection's region", [STALE_EPOCH], answer.statuses)
    statuses = await _write(trial, peer, [other_key], [(1, 0, _FILLER * 100)])
    expect("WRITE_REGION out of another connection's region", [STALE_EPOCH], statuses)
    expect("REGION_CLOSE of another connection's region", STALE_EPOCH, await _close(peer))


# ---------------------------------------------------------------- descriptors


@REGIONS.clause("5.14-no-descriptor", level=Level.FULL, needs=Feature.REGIONS)
async def no_descriptor(trial: Trial) -> None:
    """REGION_OPEN without a descriptor is an UNEXPECTED_MESSAGE."""
    peer = await _connect(trial)
    _, raw = peer.say(RegionOpen(region=1, region_bytes=4096))
    await trial.expect_violation(peer, raw, ErrorCode.UNEXPECTED_MESSAGE)


@REGIONS.clause("5.14-stray-descriptor", level=Level.FULL, needs=Feature.REGIONS)
async def stray_descriptor(trial: Trial) -> None:
    """A descriptor with any byte but the first of a REGION_OPEN is an UNEXPECTED_MESSAGE."""
    with _memory(trial, 4096) as memory:
        for second in (False, True):
            peer = await _connect(trial)
            if second:
                request_id, raw = peer.say(RegionOpen(region=1, region_bytes=4096))
                await peer.send_with_descriptor(raw[:1], memory.fd)
                await peer.send_with_descriptor(raw[1:], memory.fd)
            else:
                request_id, raw = peer.say(Ping(nonce=7))
                await peer.send_with_descriptor(raw, memory.fd)
            try:
                await peer.answer(request_id)  # a receiver may know only when the next frame begins
            except ConnectionEnded:
                pass
            else:
                _, raw = peer.say(Ping(nonce=8))
                await trial.expect_violation(peer, raw, ErrorCode.UNEXPECTED_MESSAGE)
                continue
            await trial.expect_error(peer, ErrorCode.UNEXPECTED_MESSAGE)


@REGIONS.clause("5.14-not-agreed", level=Level.FULL, needs=Feature.REGIONS)
async def not_agreed(trial: Trial) -> None:
    """REGION_OPEN, descriptor and all, is an UNEXPECTED_MESSAGE unless REGIONS was agreed on."""
    peer = await _connect(trial, Feature.NONE)
    with _memory(trial, 4096) as memory:
        raw = frame(Opcode.REGION_OPEN, struct.pack("<IIQ", 1, 0, 4096))
        await peer.send_with_descriptor(raw, memory.fd)
        await trial.expect_error(peer, ErrorCode.UNEXPECTED_MESSAGE)
