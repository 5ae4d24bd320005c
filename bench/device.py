"""The store against a bare loop on the same device, in one process: cold direct reads, writes in every mode.

Both sides use `THREADS` threads, commands of the length that the store gives its device, and the same files'
worth of bytes. They take turns, and each goes first in every second pair.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
import xxhash

from adp_client import SharedRegion
from adp_gateway.config import StoreConfig
from adp_gateway.device.direct import aligned_memory, why_not_direct
from adp_gateway.store.base import Extent, PutItem, ReadLease
from adp_gateway.store.segments import SegmentStore
from bench.reads import NAMESPACE, PAGE_SIZES
from bench.report import Row, worst

THREADS = 8
READERS = 4  # callers at a time: each batch is shared out to half of the threads, so these keep all busy
WRITERS = THREADS  # a batch is written by one thread
BATCH_BYTES = 16 << 20
SAMPLE_BYTES = 256 << 20
COMMAND_BYTES = 256 << 10
READ_BYTES = 2 << 30  # what is stored, and read a sample at a time
WARM_UPS = 1

_Side = Callable[[], Awaitable[None]]


async def measure_device(folder: Path, *, samples: int) -> list[Row]:
    """`direct_read_vs_raw` and `write_vs_raw` with their parts; direct ones where direct I/O is taken.

    What `write_vs_raw` claims is the worst in the mode that "auto" is here; the other mode has rows too.
    """
    probe = folder / "probe"
    probe.touch()
    reason = why_not_direct(probe)
    probe.unlink()
    modes: list[Literal["direct", "buffered"]] = ["direct", "buffered"]
    reads: list[Row] = []
    if reason is None:
        for label, page_bytes in PAGE_SIZES.items():
            reads.append(await _measure_reads(folder, label, page_bytes, samples))
        reads.insert(0, worst("direct_read_vs_raw", reads))
    else:
        print(f"direct I/O: left out, the file system does not take it ({reason})", flush=True)
        modes.remove("direct")
    writes = [
        await _measure_writes(folder, label, page_bytes, samples, io, durability)
        for io in modes
        for durability in ("relaxed", "durable")
        for label, page_bytes in PAGE_SIZES.items()
    ]
    claimed = [row for row in writes if row.name.startswith(f"write_vs_raw/{modes[0]}/")]
    return [*reads, worst("write_vs_raw", claimed), *writes]


def _settings(directory: Path, io: Literal["direct", "buffered"], durability: str = "relaxed") -> StoreConfig:
    return StoreConfig(
        directory=directory,
        capacity_bytes=6 << 30,
        segment_bytes=512 << 20,
        max_command_bytes=COMMAND_BYTES,
        io_threads=THREADS,
        io=io,
        durability="durable" if durability == "durable" else "relaxed",
    )


def _items(memory: memoryview, page_bytes: int, first: int) -> list[PutItem]:
    """Every page of the memory as an object with a content of its own."""
    items = []
    for at in range(len(memory) // page_bytes):
        page = memory[at * page_bytes :][:page_bytes]
        page[:8] = (first + at).to_bytes(8, "big")
        items.append(PutItem(key=b"%032d" % (first + at), checksum=xxhash.xxh3_64_intdigest(page), data=page))
    return items


async def _at_once(count: int, work: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for number in range(count):
            tasks.start_soon(work, number)


async def _in_turns(
    sample: int, before: Callable[[], Awaitable[None]], sides: Sequence[_Side]
) -> list[float]:
    """Seconds for each side. Which goes first changes from sample to sample."""
    took = [0.0] * len(sides)
    for at in range(len(sides)) if sample % 2 else reversed(range(len(sides))):
        await before()
        began = time.perf_counter()
        await sides[at]()
        took[at] = time.perf_counter() - began
    return took


# Reads


async def _measure_reads(folder: Path, label: str, page_bytes: int, samples: int) -> Row:
    """Into a region, as a READ into shared memory does it, against `preadv` of the same extents."""
    ours: list[float] = []
    reference: list[float] = []
    per_sample = SAMPLE_BYTES // page_bytes
    total = READ_BYTES // page_bytes
    with SharedRegion.create(SAMPLE_BYTES) as region:
        memory = region.memory
        memory[:] = os.urandom(1 << 20) * (SAMPLE_BYTES >> 20)
        async with SegmentStore.open(_settings(folder / f"read-{label}", "direct")) as store:
            for first in range(0, total, per_sample):
                _expect_ok(await store.put_many(NAMESPACE, _items(memory, page_bytes, first)))
            await store.flush()
            for sample in range(WARM_UPS + samples):
                first = sample * per_sample % total
                keys = [b"%032d" % at for at in range(first, first + per_sample)]
                leases = [lease for lease in store.open_read(NAMESPACE, keys) if lease is not None]
                views = [memory[at * page_bytes :][:page_bytes] for at in range(per_sample)]
                extents = [extent for lease in leases for extent in lease.extents]
                sides = [
                    functools.partial(_read_store, store, leases, views, first),
                    functools.partial(_read_bare, extents, views, first),
                ]
                took = await _in_turns(sample, functools.partial(_forget, extents, views), sides)
                for lease in leases:
                    lease.release()
                if sample >= WARM_UPS:
                    ours.append(took[0])
                    reference.append(took[1])
    return Row.of_throughput(
        f"direct_read_vs_raw/{label}", moved_bytes=SAMPLE_BYTES, ours=ours, reference=reference
    )


async def _forget(extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
    """Nothing of the files is in the page cache afterwards, nor in memory."""
    for view in views:
        view[0] = 0xFF
    for fd in {extent.fd for extent in extents}:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _expect_pages(views: Sequence[memoryview], first: int) -> None:
    for at, view in enumerate(views, first):
        if view[:8] != at.to_bytes(8, "big"):
            raise RuntimeError("a page came back wrong")


async def _read_store(
    store: SegmentStore, leases: list[ReadLease], views: list[memoryview], first: int
) -> None:
    async def call(caller: int) -> None:
        for start in range(caller * batch, len(leases), READERS * batch):
            end = start + batch
            _expect_ok(await store.read_into(leases[start:end], views[start:end], is_verified=False))

    batch = BATCH_BYTES // len(views[0])
    await _at_once(READERS, call)
    _expect_pages(views, first)


async def _read_bare(extents: list[Extent], views: list[memoryview], first: int) -> None:
    """Each thread reads every `THREADS`th page, in the store's commands."""
    direct = {
        fd: os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT)
        for fd in {extent.fd for extent in extents}
    }

    def work(thread: int) -> None:
        for extent, view in zip(extents[thread::THREADS], views[thread::THREADS], strict=True):
            fd = direct[extent.fd]
            for start in range(0, extent.length, COMMAND_BYTES):
                os.preadv(fd, (view[start : start + COMMAND_BYTES],), extent.offset + start)

    try:
        await anyio.to_thread.run_sync(_in_threads, work)
    finally:
        for fd in direct.values():
            os.close(fd)
    _expect_pages(views, first)


def _in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Writes


async def _measure_writes(
    folder: Path,
    label: str,
    page_bytes: int,
    samples: int,
    io: Literal["direct", "buffered"],
    durability: str,
) -> Row:
    """`put_many` of batches, against `pwrite` of the same pages into reserved room.

    "durable": the bare loop too syncs each batch, then writes and syncs a small record that says so.
    """
    memory = aligned_memory(SAMPLE_BYTES)
    memory[:] = os.urandom(1 << 20) * (SAMPLE_BYTES >> 20)
    per_sample = SAMPLE_BYTES // page_bytes
    ours: list[float] = []
    reference: list[float] = []
    directory = folder / f"write-{io}-{durability}-{label}"
    async with SegmentStore.open(_settings(directory, io, durability)) as store:
        for sample in range(WARM_UPS + samples):
            items = _items(memory, page_bytes, sample * per_sample)
            with _reserved(folder / "bare", io) as fd, (folder / "bare-log").open("wb") as log:
                sides = [
                    functools.partial(_write_store, store, items),
                    functools.partial(_write_bare, fd, log.fileno(), items, durability == "durable"),
                ]
                took = await _in_turns(sample, functools.partial(_settled, store), sides)
            if sample >= WARM_UPS:
                ours.append(took[0])
                reference.append(took[1])
    await anyio.to_thread.run_sync(_remove, directory)
    name = f"write_vs_raw/{io}/{durability}/{label}"
    return Row.of_throughput(name, moved_bytes=SAMPLE_BYTES, ours=ours, reference=reference)


async def _settled(store: SegmentStore) -> None:
    """What has been written is on the device: the next to be measured does not pay for it."""
    await store.flush()
    await anyio.to_thread.run_sync(os.sync)


@contextmanager
def _reserved(path: Path, io: Literal["direct", "buffered"]) -> Iterator[int]:
    """A new file with room for a sample, as a segment has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if io == "direct" else 0), 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, SAMPLE_BYTES)
        yield fd
    finally:
        os.close(fd)


async def _write_store(store: SegmentStore, items: list[PutItem]) -> None:
    async def call(caller: int) -> None:
        for start in range(caller * batch, len(items), WRITERS * batch):
            _expect_ok(await store.put_many(NAMESPACE, items[start : start + batch]))

    batch = BATCH_BYTES // items[0].length
    await _at_once(WRITERS, call)


async def _write_bare(fd: int, log: int, items: list[PutItem], is_durable: bool) -> None:
    def work(thread: int) -> None:
        for start in range(thread * batch, len(items), THREADS * batch):
            for at in range(start, min(start + batch, len(items))):
                data = items[at].data
                assert isinstance(data, memoryview)
                for offset in range(0, len(data), COMMAND_BYTES):
                    os.pwrite(fd, data[offset : offset + COMMAND_BYTES], at * len(data) + offset)
            if is_durable:
                os.fdatasync(fd)
                os.pwrite(log, bytes(192 * batch), 192 * start)
                os.fdatasync(log)

    batch = BATCH_BYTES // items[0].length
    await anyio.to_thread.run_sync(_in_threads, work)


def _remove(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


def _expect_ok(statuses: bytes) -> None:
    if any(statuses):
        raise RuntimeError(f"the store gave {sorted(set(statuses))}")
