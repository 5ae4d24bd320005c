"""How a batch is shared out to threads."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.store.base import Status
from adp_gateway.store.segments import SegmentStore
from adp_gateway.store.transfer import PORTION_BYTES, SHARE_BYTES, portions, shared_out
from gateway.objects import KIB, MIB, NAMESPACE, config, key, payload, put_all


@given(st.lists(st.integers(0, 3 * SHARE_BYTES), max_size=40), st.integers(1, 8))
def test_shares_cover_the_batch_in_order_and_are_not_small(lengths, most):
    shares = shared_out(lengths, most)
    assert [length for share in shares for length in lengths[share]] == lengths
    assert 1 <= len(shares) <= most
    if len(shares) > 1:
        assert all(lengths[share] for share in shares)
        assert len(shares) <= sum(lengths) // SHARE_BYTES


@given(st.lists(st.integers(0, 2 * PORTION_BYTES), max_size=20))
def test_portions_cover_the_batch_in_order_and_end(lengths):
    cut = portions(lengths)
    assert [length for portion in cut for length in lengths[portion]] == lengths
    assert all(len(lengths[p]) == 1 or sum(lengths[p]) <= PORTION_BYTES for p in cut if lengths)


def test_shares_are_about_equal():
    assert shared_out([MIB] * 8, 4) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert shared_out([MIB] * 8, 3) == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert shared_out([8 * MIB, 1, 1], 4) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert shared_out([1, 1, 8 * MIB], 4) == [slice(0, 3)]
    assert shared_out([], 4) == [slice(0, 0)]


@pytest.mark.anyio
async def test_a_large_batch_is_read_by_half_of_the_threads_and_answered_in_order():
    """Damage in one share is told at its place; no more than half of the threads are taken."""
    with MemoryDevice(max_command_bytes=64 * KIB) as device:
        settings = config("unused", segment_bytes=8 * MIB, capacity_bytes=32 * MIB, io_threads=4)
        async with SegmentStore.open(settings, device=device) as store:
            objects = {key(n): payload(n, 512 * KIB) for n in range(8)}
            await put_all(store, objects)
            both = threading.Barrier(2)
            threads: set[int] = set()

            def meet(command: Command) -> None:
                if command.kind is Kind.READ and threading.get_ident() not in threads:
                    threads.add(threading.get_ident())
                    both.wait(10)  # alone, it would wait in vain

            device.before = meet
            leases = store.open_read(NAMESPACE, list(objects))
            buffers = [bytearray(512 * KIB) for _ in objects]
            assert await store.read_into(leases, [memoryview(buffer) for buffer in buffers]) == bytes(8)
            assert buffers == list(objects.values())
            assert len(threads) == 2
            device.before = None
            for place in (1, 6):
                (extent,) = leases[place].extents
                os.pwrite(extent.fd, b"damage", extent.offset)
            expected = [Status.CORRUPT if place in (1, 6) else Status.OK for place in range(8)]
            assert await store.verify(leases) == bytes(expected)
            for lease in leases:
                lease.release()
