import threading
import time

import pytest

from adp_engines.geometry import Geometry, LayerRef, Tensor
from adp_engines.staging import Region, slot_bytes_for
from adp_engines.transfers import Pages, Transfers

from .fakes import ByteCopies, DictGateway

NAMESPACE = bytes(32)
BLOCKS = 40
#: (row, stride) of two tensors of group 0, and one of group 1 that shares the first tensor.
SHAPES = [(96, 128), (64, 64)]


class Rig:
    """A worker's transfers over byte arrays and a gateway in a dictionary."""

    def __init__(self, *, slots: int = 8, store_seconds: float = 10.0, blocks_per_chunk: int = 1) -> None:
        self.gateway = DictGateway()
        self.geometry = Geometry.from_description(
            [Tensor(blocks=BLOCKS, row_bytes=row, stride_bytes=stride) for row, stride in SHAPES],
            [
                [LayerRef(tensor=0, page_bytes=96), LayerRef(tensor=1, page_bytes=64)],
                [LayerRef(tensor=0, page_bytes=80)],
            ],
            blocks_per_chunk=blocks_per_chunk,
            layer_names=[["a", "b"], ["c"]],
        )
        self.tensors = [bytearray(stride * BLOCKS) for _, stride in SHAPES]
        self.copies = ByteCopies(self.geometry, self.tensors, [stride for _, stride in SHAPES])
        self.slot_bytes = slot_bytes_for(max(self.geometry.object_bytes))
        self.transfers = Transfers(
            geometry=self.geometry,
            copies=self.copies,
            region=Region.create(slots=slots, slot_bytes=self.slot_bytes),
            connect=self.gateway.connect,
            store_seconds=store_seconds,
            name="test",
        )
        self.staging = Region.create(slots=16, slot_bytes=self.slot_bytes)
        self.until(lambda: self.transfers._bridge.is_connected)

    def until(self, condition) -> None:
        """Wait, with a deadline, for what another thread does."""
        with self.transfers._changed:
            for _ in range(1000):
                if condition():
                    return
                self.transfers._changed.wait(0.01)
        raise AssertionError("it did not happen")

    def done(self, count: int = 1):
        done = []

        def collect() -> bool:
            done.extend(self.transfers.take_done())
            return len(done) >= count

        self.until(collect)
        return done

    def store(self, job_id: int, blocks: list[int], *, group: int = 0) -> None:
        per_chunk = self.geometry.blocks_per_chunk
        keys = tuple(b"key%d.%d" % (group, block) for block in blocks[::per_chunk])
        sizes = (len(blocks), 0) if group == 0 else (0, len(blocks))
        self.transfers.submit_store(
            job_id,
            Pages(group_sizes=sizes, first_indices=(0, 0), block_ids=tuple(blocks)),
            NAMESPACE,
            keys,
            (group,) * len(keys),
        )

    def load(self, job_id: int, blocks: list[int], slots: list[int], *, region: bool = True) -> None:
        self.transfers.submit_load(
            job_id,
            Pages(group_sizes=(len(blocks), 0), first_indices=(0, 0), block_ids=tuple(blocks)),
            self.staging.name if region else None,
            tuple(slots),
            (0,) * len(slots),
        )

    def paint(self, block: int, value: int) -> None:
        for tensor, (row, stride) in zip(self.tensors, SHAPES, strict=True):
            tensor[block * stride : block * stride + row] = bytes([value]) * row

    def close(self) -> None:
        self.transfers.close()
        self.staging.close()
        assert not self.transfers._copier.is_alive()


@pytest.fixture
def make_rig():
    rigs = []

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_b07_stored_object_is_the_pages_without_their_padding(make_rig) -> None:
    rig = make_rig()
    rig.paint(5, 0x55)
    rig.store(1, [5])
    (done,) = rig.done()
    assert (done.job_id, done.is_failed, done.moved_bytes) == (1, False, 160)
    assert rig.gateway.objects == {(NAMESPACE, b"key0.5"): b"\x55" * 160}


def test_job_with_more_objects_than_slots_goes_out_in_parts(make_rig) -> None:
    rig = make_rig(slots=3)
    for block in range(1, 31):
        rig.paint(block, block)
    rig.store(1, list(range(1, 31)))
    (done,) = rig.done()
    assert done.moved_bytes == 30 * 160
    assert rig.gateway.objects == {(NAMESPACE, b"key0.%d" % b): bytes([b]) * 160 for b in range(1, 31)}
    assert rig.transfers._pool.free == 3


def test_chunks_of_several_blocks_keep_their_order(make_rig) -> None:
    rig = make_rig(blocks_per_chunk=2, slots=1)
    for block in (3, 4, 7, 8):
        rig.paint(block, block)
    rig.store(1, [7, 4, 3, 8])
    rig.done()
    assert rig.gateway.objects == {
        (NAMESPACE, b"key0.7"): bytes([7] * 96 + [4] * 96 + [7] * 64 + [4] * 64),
        (NAMESPACE, b"key0.3"): bytes([3] * 96 + [8] * 96 + [3] * 64 + [8] * 64),
    }


def test_load_writes_its_blocks_and_no_neighbour(make_rig) -> None:
    rig = make_rig()
    for tensor in rig.tensors:
        tensor[:] = b"\xee" * len(tensor)
    rig.staging.slot(9, 160)[:] = bytes([1] * 96 + [2] * 64)
    rig.load(1, [6], [9])
    (done,) = rig.done()
    assert (done.is_load, done.is_failed) == (True, False)
    assert rig.tensors[0] == b"\xee" * (6 * 128) + b"\1" * 96 + b"\xee" * (32 + 33 * 128)
    assert rig.tensors[1] == b"\xee" * (6 * 64) + b"\2" * 64 + b"\xee" * (33 * 64)


def test_b15_load_that_cannot_be_done_is_reported_and_touches_nothing(make_rig) -> None:
    rig = make_rig()
    rig.load(1, [6], [9], region=False)
    rig.load(2, [6, 7], [9])  # two blocks, one object
    (gone,) = [rig.staging]
    first, second = rig.done(2)
    assert (first.is_failed, second.is_failed) == (True, True)
    gone.close()
    rig.load(3, [6], [9])
    (third,) = rig.done()
    assert third.is_failed
    assert not any(rig.tensors[0])
    assert rig.transfers.counters.loads_failed == 3


def test_refused_store_is_done_and_counted(make_rig) -> None:
    rig = make_rig()
    rig.gateway.refuses_writes = True
    rig.store(1, [5, 6])
    (done,) = rig.done()
    assert (done.is_failed, done.moved_bytes) == (False, 0)
    assert rig.transfers.counters.stores_refused == 2
    assert rig.transfers._pool.free == 8


def test_nothing_is_copied_for_a_gateway_that_is_away(make_rig) -> None:
    rig = make_rig()
    rig.gateway.is_connected = False
    rig.store(1, [5, 6])
    rig.done()
    assert rig.transfers.counters.stores_disconnected == 2
    assert rig.gateway.verbs == []


class TestSilentGateway:
    def test_b10_pages_are_free_as_soon_as_they_are_copied(self, make_rig) -> None:
        rig = make_rig()
        rig.gateway.is_silent = True
        rig.paint(4, 0xAA)
        rig.store(1, [4])
        assert rig.transfers.wait_settled({1}, 10) == ()
        rig.paint(4, 0xBB)  # the block is somebody else's now
        assert rig.transfers.take_done() == []
        (staged,) = [slot for slot in range(8) if rig.transfers._region.slot(slot, 1)[0]]
        assert bytes(rig.transfers._region.slot(staged, 160)) == b"\xaa" * 160

    def test_waiting_never_waits_for_slots(self, make_rig) -> None:
        """The first job fills staging and hangs; the second is given up the moment the engine needs its
        pages."""
        rig = make_rig(slots=2, store_seconds=1000)
        rig.gateway.is_silent = True
        rig.store(1, [1, 2, 3])
        rig.store(2, [4])
        began = time.monotonic()
        assert rig.transfers.wait_settled({2}, 10) == ()
        assert rig.transfers.wait_settled({1}, 10) == ()
        assert time.monotonic() - began < 5
        assert rig.transfers.counters.stores_shed == 2
        assert [done.job_id for done in rig.done()] == [2]

    def test_b17_store_ends_at_its_deadline(self, make_rig) -> None:
        rig = make_rig(slots=1, store_seconds=0.1)
        rig.gateway.is_silent = True
        rig.store(1, [1, 2])
        (done,) = rig.done()
        assert (done.job_id, done.moved_bytes) == (1, 0)
        assert rig.transfers._pool.free == 1

    def test_loads_do_not_wait_behind_stores(self, make_rig) -> None:
        rig = make_rig(slots=1, store_seconds=1000)
        rig.gateway.is_silent = True
        rig.store(1, [1, 2])
        rig.load(2, [6], [9])
        assert [done.job_id for done in rig.done()] == [2]

    def test_close_does_not_hang(self, make_rig) -> None:
        rig = make_rig(slots=1, store_seconds=1000)
        rig.gateway.is_silent = True
        rig.store(1, [1, 2])
        rig.transfers.wait_settled({1}, 10)


def test_copy_that_the_engine_stopped_waiting_for_is_not_stored(make_rig) -> None:
    rig = make_rig()
    started, may_end = threading.Event(), threading.Event()
    copy = rig.copies.store

    def slow_store(*arguments) -> None:
        started.set()
        assert may_end.wait(10)
        copy(*arguments)

    rig.copies.store = slow_store
    rig.store(1, [4])
    assert started.wait(10)
    assert rig.transfers.wait_settled({1}, 0.01) == (1,)
    may_end.set()
    rig.done()
    assert rig.gateway.objects == {}
    assert rig.transfers.counters.stores_revoked == 1
    assert rig.transfers._pool.free == 8


def test_store_then_load_brings_back_both_groups(make_rig) -> None:
    rig = make_rig()
    rig.paint(5, 5)
    rig.paint(6, 6)
    rig.store(1, [5])
    rig.store(2, [6], group=1)
    rig.done(2)
    rig.staging.slot(0, 160)[:] = rig.gateway.objects[NAMESPACE, b"key0.5"]
    rig.staging.slot(1, 80)[:] = rig.gateway.objects[NAMESPACE, b"key1.6"]
    rig.transfers.submit_load(
        3,
        Pages(group_sizes=(1, 1), first_indices=(0, 9), block_ids=(20, 21)),
        rig.staging.name,
        (0, 1),
        (0, 1),
    )
    rig.done()
    assert rig.tensors[0][20 * 128 : 20 * 128 + 96] == bytes([5]) * 96
    assert rig.tensors[0][21 * 128 : 21 * 128 + 96] == bytes([6] * 80 + [0] * 16)
    assert rig.tensors[1][20 * 64 : 21 * 64] == bytes([5]) * 64
