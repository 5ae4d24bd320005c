"""What a million objects cost a gateway: the memory it grows by, and the time it takes to open their store.

Memory: a real gateway process, from before the first of a million puts to after the last.

Opening: `SegmentStore.open` in a process of its own, from the call to the usable store, journals in the page
cache. That store is not made by a million puts of 256 KiB but by the format's own encoder: headers and
commits as a gateway writes them, and data files that are holes of the right length. Opening reads journals
and the lengths of data files, nothing else, so it cannot tell the difference.
"""

from __future__ import annotations

import hashlib
import os
import socket
import statistics
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from adp_client import Client, ErrorCode, ObjectKey
from adp_gateway.config import MIB
from adp_gateway.store.format import (
    SUPERBLOCK_NAME,
    Header,
    Kind,
    Record,
    data_name,
    encode_header,
    encode_records,
    encode_superblock,
    journal_name,
)
from adp_gateway.store.segment import Layout, extent_bytes
from bench.reads import NAMESPACE
from bench.report import Row

OBJECTS = 1_000_000
BATCH = 1_000
WARM_UP_OBJECTS = 10_000
PAGE_BYTES = 256 << 10
SEGMENT_BYTES = 2048 * MIB  # what a gateway chooses for a million of these
OPENINGS = 5

#: Other segments than the store has, so that the newest is not opened for writing: that would fill its hole.
_OPEN = """
import functools, sys, time
from pathlib import Path
import anyio
from adp_gateway.config import StoreConfig
from adp_gateway.store.segments import SegmentStore

async def main():
    config = StoreConfig(directory=Path(sys.argv[1]), capacity_bytes=1 << 40, segment_bytes=1 << 30)
    began = time.perf_counter()
    async with SegmentStore.open(config) as store:
        print(time.perf_counter() - began, store.stats().objects, flush=True)

anyio.run(main)
"""


def keys(first: int, count: int) -> Iterator[bytes]:
    """Keys as the adapters write them, 40 bytes."""
    for n in range(first, first + count):
        yield ObjectKey(block_hash=hashlib.sha256(f"page {n}".encode()).digest(), group=0).to_bytes()


def measure_reopen(folder: Path) -> Row:
    """`reopen_1m_objects_s`."""
    store = folder / "million"
    make_store(store)
    seconds = [open_store(store) for _ in range(1 + OPENINGS)][1:]
    return Row(
        name="reopen_1m_objects_s",
        ours=round(statistics.median(seconds), 2),
        reference=None,
        ratio=None,
        unit="s",
        samples=OPENINGS,
    )


def make_store(folder: Path) -> None:
    """A directory as a gateway leaves it that has stored `OBJECTS` pages."""
    folder.mkdir()
    (folder / SUPERBLOCK_NAME).write_bytes(encode_superblock())
    layout = Layout(SEGMENT_BYTES)
    made = segment_id = 0
    while made < OBJECTS:
        segment_id += 1
        count = min(OBJECTS - made, layout.data_bytes // extent_bytes(PAGE_BYTES), layout.max_commits)
        records = [
            Record(Kind.COMMIT, NAMESPACE, key, n * extent_bytes(PAGE_BYTES), PAGE_BYTES, n, 1 + made + n)
            for n, key in enumerate(keys(made, count))
        ]
        header = encode_header(Header(segment_id, SEGMENT_BYTES))
        (folder / journal_name(segment_id)).write_bytes(
            header + encode_records(records, segment_id=segment_id, slot=1)
        )
        with (folder / data_name(segment_id)).open("wb") as data:
            data.truncate(count * extent_bytes(PAGE_BYTES))
        made += count


def open_store(folder: Path) -> float:
    """Seconds to open it, in a process of its own."""
    command = [sys.executable, "-c", _OPEN, str(folder)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    if int(answer[1]) != OBJECTS:
        raise RuntimeError(f"the store opened with {answer[1]} objects")
    return float(answer[0])


async def measure_memory(client: Client, *, path: Path) -> Row:
    """`memory_per_object_bytes` of the gateway that listens at `path`, an empty one."""
    pid = process_at(path)
    await put(client, OBJECTS, WARM_UP_OBJECTS)
    before = resident_bytes(pid)
    await put(client, 0, OBJECTS)
    grown = resident_bytes(pid) - before
    return Row(
        name="memory_per_object_bytes",
        ours=round(grown / OBJECTS, 1),
        reference=None,
        ratio=None,
        unit="bytes",
        samples=1,
    )


async def put(client: Client, first: int, count: int) -> None:
    """Write empty objects: what they hold makes no difference to what the gateway remembers."""
    for start in range(first, first + count, BATCH):
        written = await client.write(NAMESPACE, list(keys(start, BATCH)), [b""] * BATCH)
        if set(written.statuses) != {ErrorCode.OK}:
            raise RuntimeError(f"WRITE gave {sorted(set(written.statuses))}")


def process_at(path: Path) -> int:
    """Who listens at a Unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid)


def resident_bytes(pid: int) -> int:
    """What a process has in memory now, all included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
