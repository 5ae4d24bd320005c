"""W1 with the real gateway and its store on a device of small commands: who cuts makes no difference."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from adp_client import Client, ClientConfig, Timeouts, link
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Limits
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.segments import SegmentStore

from .house import house
from .objects import KIB, MIB, config
from .peer import NAMESPACE, content, key_of

pytestmark = pytest.mark.anyio

L = 16 * KIB
SIZES = [0, 1, L - 1, L, L + 1, L * 27 // 8, 64 * L]
PATIENT = Timeouts(exist_seconds=60, idle_ping_seconds=60, release_seconds=60)


@pytest.fixture(params=["gateway cuts", "client cuts"])
def who(request, monkeypatch) -> str:
    """A client that does not offer FRAGMENTS meets a gateway that does not announce it."""
    if request.param == "client cuts":
        monkeypatch.setattr(link, "FEATURES", link.FEATURES & ~Feature.FRAGMENTS)
    return request.param


@asynccontextmanager
async def served(device: MemoryDevice, directory, **store) -> AsyncIterator[Client]:
    limits = Limits(max_command_bytes=L, max_payload_bytes=3 * L, max_object_bytes=2 * MIB)
    async with (
        SegmentStore.open(config(directory, max_command_bytes=L, **store), device=device) as opened,
        house(opened, limits=limits) as home,
    ):

        async def dial(_endpoint):
            return home.dial()

        settings = ClientConfig(endpoint="tcp://gateway.test:7171", timeouts=PATIENT)
        async with Client(settings, dial=dial) as client:
            await client.wait_connected()
            yield client


async def test_every_size_through_every_verb(who, tmp_path):
    keys = [key_of(at) for at in range(len(SIZES))]
    objects = [content(size, seed=at) for at, size in enumerate(SIZES)]
    with MemoryDevice(max_command_bytes=L) as device:
        async with served(device, tmp_path, capacity_bytes=64 * MIB, segment_bytes=4 * MIB) as client:
            assert (Feature.FRAGMENTS in client.gateway.features) == (who == "gateway cuts")
            assert (await client.write(NAMESPACE, keys, objects)).is_all_ok
            assert (await client.exist(NAMESPACE, [*keys, b"absent" * 2 + b"four"])).leading_ok == len(keys)
            memory = [bytearray(size + 1) for size in SIZES]
            read = await client.read(NAMESPACE, keys, memory)
            assert read.lengths == tuple(SIZES)
            assert [bytes(got[:size]) for got, size in zip(memory, SIZES, strict=True)] == objects
            assert (await client.check(NAMESPACE, keys)).is_all_ok
            assert (await client.delete(NAMESPACE, keys[:-1])).is_all_ok
            assert (await client.exist(NAMESPACE, keys)).statuses == b"\1" * (len(keys) - 1) + b"\0"
        assert max(command.length for command in device.commands) <= L


async def test_what_is_evicted_is_evicted_as_a_whole(who, tmp_path):
    """Far more than there is room for; then every object is there or not, for EXIST as for READ."""
    keys = [key_of(at) for at in range(60)]
    objects = [content(11 * L - 5, seed=at) for at in range(60)]
    with MemoryDevice(max_command_bytes=L) as device:
        async with served(device, tmp_path) as client:
            for at in range(60):
                assert (await client.write(NAMESPACE, keys[at : at + 1], objects[at : at + 1])).is_all_ok
            found = await client.exist(NAMESPACE, keys)
            memory = [bytearray(11 * L) for _ in keys]
            read = await client.read(NAMESPACE, keys, memory)
            assert found.statuses == read.statuses
            assert set(read.statuses) == {0, 1}
            assert read.statuses[-1] == 0
            for got, length, wanted in zip(memory, read.lengths, objects, strict=True):
                assert bytes(got[:length]) in (b"", wanted)
