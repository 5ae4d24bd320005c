"""A gateway in a dictionary, with a switch for everything that can go wrong, and a host-memory stand-in for a
device."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import attrs

from adp_engines.geometry import Geometry, Moves
from adp_engines.staging import Region


@attrs.frozen
class Answer:
    statuses: bytes
    lengths: tuple[int, ...] = ()


class DictGateway:
    """What every client of it sees. Set the attributes from any thread."""

    def __init__(self) -> None:
        self.objects: dict[tuple[bytes, bytes], bytes] = {}
        self.is_connected = True
        self.is_silent = False
        self.refuses_writes = False
        self.verbs: list[str] = []

    @asynccontextmanager
    async def connect(self) -> AsyncIterator["DictClient"]:
        yield DictClient(self)


class DictClient:
    def __init__(self, gateway: DictGateway) -> None:
        self._gateway = gateway

    @property
    def is_connected(self) -> bool:
        return self._gateway.is_connected

    async def _turn(self, verb: str) -> None:
        self._gateway.verbs.append(verb)
        if self._gateway.is_silent:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()

    async def ping(self) -> None:
        await self._turn("ping")

    async def exist(self, namespace: bytes, keys: Sequence[bytes]) -> Answer:
        await self._turn("exist")
        return Answer(bytes((namespace, key) not in self._gateway.objects for key in keys))

    async def read(self, namespace: bytes, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Answer:
        await self._turn("read")
        found = [self._gateway.objects.get((namespace, key)) for key in keys]
        for data, buffer in zip(found, buffers, strict=True):
            if data is not None:
                buffer[: len(data)] = data
        return Answer(bytes(data is None for data in found), tuple(len(data or b"") for data in found))

    async def write(self, namespace: bytes, keys: Sequence[bytes], payloads: Sequence[memoryview]) -> Answer:
        await self._turn("write")
        if self._gateway.refuses_writes:
            return Answer(bytes([3] * len(keys)))
        for key, payload in zip(keys, payloads, strict=True):
            self._gateway.objects[namespace, key] = bytes(payload)
        return Answer(bytes(len(keys)))


class ByteCopies:
    """Page copies between byte arrays: what a device does, one page at a time."""

    def __init__(self, geometry: Geometry, tensors: Sequence[bytearray], strides: Sequence[int]) -> None:
        self._geometry = geometry
        self._tensors = tensors
        self._strides = strides

    def mark(self) -> None:
        return None

    def store(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        for page, staged in self._pairs(moves, region, slots):
            staged[:] = page

    def load(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        for page, staged in self._pairs(moves, region, slots):
            page[:] = staged

    def _pairs(self, moves: Moves, region: Region, slots: Sequence[int]):
        for run in self._geometry.groups[moves.group].runs:
            for block, index, place in zip(moves.blocks, moves.objects, moves.places, strict=True):
                start = block * self._strides[run.tensor]
                inside = run.offset + place * run.page_bytes
                yield (
                    memoryview(self._tensors[run.tensor])[start : start + run.page_bytes],
                    region.slot(slots[index])[inside : inside + run.page_bytes],
                )
