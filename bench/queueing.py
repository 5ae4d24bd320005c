"""READs while a long queue of WRITEs of the same client waits: what the slowest of a hundred takes, over its
value when nothing else is going on. Reads go before writes, so the queue must hardly be felt."""

from __future__ import annotations

import statistics
import time

import anyio

from adp_client import Client
from bench.reads import NAMESPACE, expect_ok
from bench.report import Row

QUEUED_WRITES = 2000
PAGE_BYTES = 256 << 10
READ_PAGES = 64
WARM_UPS = 8


async def measure_queueing(client: Client, *, samples: int) -> Row:
    """`read_p99_under_writes`: at least `samples` READs of 64 pages on either side. Its ratio says how many
    times as long, not as fast: that is what its bar is about."""
    keys = [f"queue/read/{page:020}".encode() for page in range(READ_PAGES)]
    expect_ok((await client.write(NAMESPACE, keys, [bytes(PAGE_BYTES)] * READ_PAGES)).statuses, "WRITE")
    buffers = [bytearray(PAGE_BYTES) for _ in keys]

    async def read() -> float:
        began = time.perf_counter()
        expect_ok((await client.read(NAMESPACE, keys, buffers)).statuses, "READ")
        return time.perf_counter() - began

    for _ in range(WARM_UPS):
        await read()
    idle = [await read() for _ in range(samples)]

    busy: list[float] = []
    payload = bytes(PAGE_BYTES)
    written = 0
    while len(busy) < samples:
        waiting = QUEUED_WRITES

        async def write(number: int) -> None:
            nonlocal waiting
            key = f"queue/write/{number:019}".encode()
            expect_ok((await client.write(NAMESPACE, [key], [payload])).statuses, "WRITE")
            waiting -= 1

        async with anyio.create_task_group() as tasks:
            for _ in range(QUEUED_WRITES):
                tasks.start_soon(write, written % (2 * QUEUED_WRITES))
                written += 1
            while waiting == QUEUED_WRITES:  # until the first is answered they are still being queued
                await anyio.lowlevel.checkpoint()
            while waiting:
                busy.append(await read())
    slow, usual = p99(busy), p99(idle)
    return Row(
        name="read_p99_under_writes",
        ours=round(slow * 1e3, 3),
        reference=round(usual * 1e3, 3),
        ratio=round(slow / usual, 3),
        unit="ms",
        samples=len(busy),
    )


def p99(seconds: list[float]) -> float:
    """What 99 of 100 stay below."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]
