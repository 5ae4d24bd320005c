"""Clients that write, overwrite, read, lease and delete as fast as they are answered, until cancelled.

Each has several lanes, and a lane owns names, which it alone writes and deletes, one call at a time;
everybody reads everything. Every byte that comes back is judged at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress

import anyio
import anyio.abc
import attrs

from adp_client import BackoffConfig, Client, ClientConfig, ErrorCode, RegionSlice, SharedRegion
from adp_client.errors import LinkError, RequestError, RequestTimeout

from .history import History, Name, Step
from .problems import Problems

NAMESPACES = (bytes(range(32)), bytes(31) + b"\1")
LANES_PER_CLIENT = 4
NAMES_PER_LANE = 8
MOST_ITEMS = 4
LEASE_SECONDS = 2.0
REGION_BYTES = 16 << 20  # of each lane that has one

#: What ends a call when the gateway goes: nobody knows then whether it was done.
GONE = (LinkError, RequestTimeout)


@attrs.define
class Tally:
    """What was done."""

    writes: int = 0
    deletes: int = 0
    refused: int = 0
    reads: int = 0  # objects that came back and were judged
    misses: int = 0
    leased_reads: int = 0
    written_bytes: int = 0


@attrs.define(eq=False, kw_only=True)
class Storm:
    """All clients of one round. `budget_bytes`: how much they may write altogether."""

    history: History
    tally: Tally
    problems: Problems
    sizes: Sequence[int]
    may_evict: bool
    budget_bytes: int
    has_begun: anyio.Event = attrs.field(factory=anyio.Event)  # something has been acknowledged

    async def run(self, endpoints: Sequence[str], clients: int, source: random.Random) -> None:
        """Until cancelled. Client 0 writes from and reads into memory that it shares with the gateway."""
        async with anyio.create_task_group() as tasks:
            for number in range(clients):
                seed = source.random()
                tasks.start_soon(self._live, number, endpoints[number % len(endpoints)], seed)

    async def _live(self, number: int, endpoint: str, seed: float) -> None:
        source = random.Random(seed)
        config = ClientConfig(endpoint=endpoint, backoff=BackoffConfig(cap_seconds=0.2))
        async with Client(config) as client, anyio.create_task_group() as lanes:
            for lane in range(LANES_PER_CLIENT):
                names = names_of(number * LANES_PER_CLIENT + lane)
                lanes.start_soon(self._work, client, random.Random(source.random()), names, number == 0)

    async def _work(self, client: Client, source: random.Random, names: list[Name], is_sharing: bool) -> None:
        with SharedRegion.create(REGION_BYTES) as region, suppress(*GONE):
            lane = _Lane(self, client, source, names, region if is_sharing else None)
            verbs = [lane.write] * 6 + [lane.read] * 4 + [lane.read_leased] * 2 + [lane.delete]
            while True:
                await source.choice(verbs)()


def names_of(lane: int) -> list[Name]:
    """The names that a lane owns."""
    return [
        (NAMESPACES[number % len(NAMESPACES)], b"lane-%03d-object-%03d" % (lane, number) + b"\xa5" * 20)
        for number in range(NAMES_PER_LANE)
    ]


@attrs.define(eq=False)
class _Lane:
    _storm: Storm
    _client: Client
    _source: random.Random
    _names: list[Name]
    _region: SharedRegion | None

    def _draw(self, names: list[Name]) -> tuple[bytes, list[Name]]:
        """Some names of one namespace."""
        namespace = self._source.choice(NAMESPACES)
        here = [name for name in names if name[0] == namespace]
        return namespace, self._source.sample(here, min(len(here), self._source.randint(1, MOST_ITEMS)))

    async def write(self) -> None:
        storm = self._storm
        namespace, names = self._draw(self._names)
        sizes = [self._source.choice(storm.sizes) for _ in names]
        if storm.tally.written_bytes + sum(sizes) > storm.budget_bytes:
            await anyio.sleep(0.01)
            return
        storm.tally.written_bytes += sum(sizes)
        steps: list[Step] = []
        payloads: list[bytes] = []
        for name, size in zip(names, sizes, strict=True):
            step, data = storm.history.write(name, size)
            steps.append(step)
            payloads.append(data)
        try:
            result = await self._client.write(namespace, [key for _, key in names], self._sent(payloads))
        except RequestError:
            statuses = bytes([ErrorCode.OVERLOADED]) * len(names)
        else:
            statuses = result.statuses
        for name, step, status in zip(names, steps, statuses, strict=True):
            if status == ErrorCode.OK:
                storm.history.acknowledge(step)
                storm.has_begun.set()
                storm.tally.writes += 1
                continue
            storm.history.withdraw(name, step)
            storm.tally.refused += 1
            if status not in (ErrorCode.CAPACITY_EXHAUSTED, ErrorCode.OVERLOADED):
                storm.problems.add("refused", f"WRITE of {step.length} bytes: {ErrorCode(status).name}")

    def _sent(self, payloads: list[bytes]) -> Sequence[bytes | RegionSlice]:
        """The payloads, in the shared region if there is one with room for them."""
        if self._region is None or sum(map(len, payloads)) > REGION_BYTES:
            return payloads
        at = 0
        slices: list[bytes | RegionSlice] = []
        for data in payloads:
            part = self._region.slice(at, len(data))
            part.memory[:] = data  # nothing of it is in a call any more: a lane makes one at a time
            slices.append(part)
            at += len(data)
        return slices

    async def delete(self) -> None:
        storm = self._storm
        namespace, names = self._draw(self._names)
        names = names[:2]
        steps = [storm.history.delete(name) for name in names]
        try:
            result = await self._client.delete(namespace, [key for _, key in names])
        except RequestError:
            for name, step in zip(names, steps, strict=True):
                storm.history.withdraw(name, step)
            return
        for step, status in zip(steps, result.statuses, strict=True):
            if status in (ErrorCode.OK, ErrorCode.NOT_FOUND):
                storm.history.acknowledge(step)
                storm.tally.deletes += 1
            else:
                storm.problems.add("refused", f"DELETE: {ErrorCode(status).name}")

    async def read(self) -> None:
        namespace, names = self._draw(self._storm.history.names or self._names)
        await self._read(namespace, names)

    async def read_leased(self) -> None:
        """What EXIST said is there, a READ under the lease gets."""
        namespace, names = self._draw(self._storm.history.names or self._names)
        found = await self._client.exist(namespace, [key for _, key in names], lease_seconds=LEASE_SECONDS)
        if found.lease is None:
            return
        async with found.lease:
            there = [name for name, s in zip(names, found.statuses, strict=True) if s == ErrorCode.OK]
            missed = await self._read(namespace, there)
            if missed and found.lease.is_live:
                self._storm.problems.add("lease", f"{missed} objects under a live lease were not there")
            self._storm.tally.leased_reads += len(there)

    async def _read(self, namespace: bytes, names: list[Name]) -> int:
        """Read and judge; how many were not there."""
        storm = self._storm
        since = storm.history.now()
        buffers = [bytearray(storm.history.longest(name)) for name in names]
        result = await self._client.read(namespace, [key for _, key in names], buffers)
        until = storm.history.now()
        missed = 0
        for name, status, length, buffer in zip(names, result.statuses, result.lengths, buffers, strict=True):
            found = None if status != ErrorCode.OK else memoryview(buffer)[:length]
            if status == ErrorCode.TOO_LARGE:
                continue  # written meanwhile
            if status not in (ErrorCode.OK, ErrorCode.NOT_FOUND):
                storm.problems.add("corrupt", f"READ of {name[1]!r}: {ErrorCode(status).name}")
                continue
            if found is None:
                missed += 1
                storm.tally.misses += 1
            else:
                storm.tally.reads += 1
            verdict = storm.history.judge(name, found, since, until, may_evict=storm.may_evict)
            if verdict is not None:
                allowed = storm.history.tell(name, since, until)
                storm.problems.add(
                    verdict.name.lower(), f"READ of {name[1]!r}: {verdict.value}; allowed: {allowed}"
                )
        return missed
