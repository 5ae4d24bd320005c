"""What the records of a journal add up to, read piece by piece; damaged ones among them."""

import os
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.device.memory import Kind as CommandKind
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.errors import DeviceFull
from adp_gateway.fsck import Damage, check, check_device
from adp_gateway.store.base import Status
from adp_gateway.store.format import (
    RECORD_BYTES,
    UNIT_BYTES,
    Kind,
    Record,
    decode_columns,
    encode_records,
    journal_name,
    to_records,
)
from adp_gateway.store.replay import Replay, Replayed
from adp_gateway.store.segment import extent_bytes
from adp_gateway.store.segments import SegmentStore
from gateway.objects import KIB, NAMESPACE, after_kill, config, get, key, payload, put, put_all

ALL = 1 << 50  # a data file that holds everything


def commit(n: int, length: int = 5000) -> Record:
    return Record(Kind.COMMIT, NAMESPACE, key(n), n * 2 * UNIT_BYTES, length, 0x1234567 * (n + 1), n + 1)


def kill(n: int) -> Record:
    return commit(n)._replace(kind=Kind.KILL)


def replayed(raw: bytes, *, piece: int = 1 << 20, data_bytes: int = ALL) -> Replayed:
    replay = Replay()
    for start in range(0, len(raw), piece * RECORD_BYTES):
        slot = 1 + start // RECORD_BYTES
        part = raw[start : start + piece * RECORD_BYTES]
        replay.add(*decode_columns(part, segment_id=1, slot=slot), slot=slot)
    return replay.outcome(data_bytes=data_bytes)


def expected(records: list[Record | None], data_bytes: int) -> tuple[object, ...]:
    """One after the other: the rule, in as few words as it has."""
    unkilled: dict[int, Record] = {}
    commits = tail_bytes = damaged = undecided = 0
    slots = 1
    for slot, record in enumerate(records, 1):
        if record is None:
            undecided += 1
            continue
        damaged, undecided, slots = damaged + undecided, 0, slot + 1
        if record.kind == Kind.COMMIT:
            commits += 1
            tail_bytes = max(tail_bytes, record.offset + extent_bytes(record.length))
            unkilled[record.offset] = record
        elif unkilled.pop(record.offset, None) is None:
            commits += 1
    live = {r for r in unkilled.values() if r.offset + r.length <= data_bytes}
    return live, set(unkilled.values()) - live, commits + damaged, tail_bytes, damaged, slots


@given(
    st.lists(st.tuples(st.sampled_from([commit, kill]), st.integers(0, 6), st.booleans()), max_size=40),
    st.integers(1, 8),
    st.integers(0, 60_000),
)
def test_it_is_what_one_record_after_the_other_gives(script, piece, data_bytes):
    raw, records = bytearray(), []
    for make, n, is_lost in script:
        record, slot = make(n), len(records) + 1
        raw += bytes(RECORD_BYTES) if is_lost else encode_records([record], segment_id=1, slot=slot)
        records.append(None if is_lost else record)
    found = replayed(bytes(raw), piece=piece, data_bytes=data_bytes)
    assert not len(found.doubtful)
    assert (
        set(to_records(found.live)),
        set(to_records(found.missing)),
        found.commits,
        found.tail_bytes,
        found.damaged_records,
        found.slots,
    ) == expected(records, data_bytes)


@pytest.mark.parametrize("behind", [[], [commit(3)]], ids=["at the end", "in the middle"])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_no_flipped_bit_of_a_kill_brings_its_object_back(behind, piece):
    raw = encode_records([commit(0), commit(1), commit(2), kill(1), *behind], segment_id=1, slot=1)
    others = {commit(0), commit(2), *behind}
    for bit in range(8 * RECORD_BYTES):
        damaged = bytearray(raw)
        damaged[3 * RECORD_BYTES + bit // 8] ^= 1 << bit % 8
        found = replayed(bytes(damaged), piece=piece)
        assert set(to_records(found.live)) == others
        assert list(to_records(found.doubtful)) == [commit(1)]


def test_what_goes_with_the_bytes_of_a_kill_is_only_what_it_named():
    """A sector of 512 bytes: two of three fields are enough, one is not, and nothing names nothing."""
    raw = encode_records([commit(0), commit(1), kill(1), commit(2)], segment_id=1, slot=1)
    start = 2 * RECORD_BYTES
    for lost, is_named in (
        (slice(0, 12), True),
        (slice(12, 16), True),
        (slice(16, 24), True),
        (slice(24, 192), True),
        (slice(12, 24), False),
        (slice(16, 192), False),
        (slice(0, 192), False),
    ):
        damaged = bytearray(raw)
        damaged[start + lost.start : start + lost.stop] = b"\xa5" * (lost.stop - lost.start)
        found = replayed(bytes(damaged))
        assert list(to_records(found.doubtful)) == ([commit(1)] if is_named else [])
        assert len(found.live) == (2 if is_named else 3)


def test_no_flipped_bit_of_a_commit_takes_another_object_along():
    raw = encode_records([commit(0), commit(1), commit(2)], segment_id=1, slot=1)
    for bit in range(8 * RECORD_BYTES):
        damaged = bytearray(raw)
        damaged[RECORD_BYTES + bit // 8] ^= 1 << bit % 8
        found = replayed(bytes(damaged))
        assert list(to_records(found.live)) == [commit(0), commit(2)]
        assert not len(found.doubtful)


def test_a_record_in_front_of_a_commit_does_not_void_it():
    raw = bytearray(encode_records([kill(1), commit(1)], segment_id=1, slot=1))
    raw[100] ^= 1
    found = replayed(bytes(raw))
    assert list(to_records(found.live)) == [commit(1)]


def test_a_damaged_record_alone_is_a_torn_tail():
    raw = bytearray(encode_records([commit(1)], segment_id=1, slot=1))
    raw[100] ^= 1
    found = replayed(bytes(raw))
    assert (found.slots, found.damaged_records, len(found.live), len(found.doubtful)) == (1, 0, 0, 0)


def test_columns_are_the_records():
    records = [commit(0), kill(0), commit(1, 0), Record(Kind.COMMIT, bytes(32), b"\0", 0, 1, 2, 3)]
    columns, is_whole = decode_columns(encode_records(records, segment_id=9, slot=4), segment_id=9, slot=4)
    assert is_whole.all()
    assert list(to_records(columns)) == records
    assert list(to_records(columns[np.zeros(0, np.int64)])) == []


# ---------------------------------------------------------------------------------------------- whole stores


async def deleted(device: MemoryDevice) -> MemoryDevice:
    """A device with objects 0 to 2, of which 1 has been deleted."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(3)})
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([Status.OK])
    return after_kill(device)


def damage(device: MemoryDevice, slot: int, byte: int) -> None:
    file = device.open(journal_name(1))
    raw = bytearray(1)
    file.read_into(memoryview(raw), slot * RECORD_BYTES + byte)
    raw[0] ^= 0x60  # two bits: one alone would be put back
    file.write(memoryview(raw), slot * RECORD_BYTES + byte)
    file.close()


KILL_SLOT = 4


@pytest.mark.anyio
@pytest.mark.parametrize("is_last", [True, False])
async def test_what_was_deleted_stays_deleted_when_its_kill_is_damaged(is_last):
    with MemoryDevice() as first, await deleted(first) as device:
        if not is_last:
            async with SegmentStore.open(config("unused"), device=device) as store:
                assert await put(store, key(3), payload(3, 5000)) == Status.OK
        damage(device, KILL_SLOT, 90)
        async with SegmentStore.open(config("unused"), device=device) as store:
            assert store.recovery.doubtful_commits == 1
            assert store.recovery.damaged_records == (0 if is_last else 1)
            assert "1 objects dropped that may have been deleted" in str(store.recovery)
            assert await get(store, key(1)) == Status.NOT_FOUND
            assert await get(store, key(0)) == payload(0, 5000)
        with after_kill(device) as again:
            async with SegmentStore.open(config("unused"), device=again) as store:
                assert store.recovery.doubtful_commits == 0, "its kill has been written"
                assert store.stats().objects == (2 if is_last else 3)


@pytest.mark.anyio
async def test_a_kill_that_cannot_be_written_at_once_is_written_later():
    with MemoryDevice() as first, await deleted(first) as device:
        damage(device, KILL_SLOT, 90)
        failures = [DeviceFull("no room")]

        def refuse(command):
            if command.name == journal_name(1) and command.kind is CommandKind.WRITE and failures:
                raise failures.pop()

        device.before = refuse
        async with SegmentStore.open(config("unused"), device=device) as store:
            assert not failures
            assert await get(store, key(1)) == Status.NOT_FOUND
        async with SegmentStore.open(config("unused"), device=device) as store:
            assert store.recovery.doubtful_commits == store.recovery.cut_bytes == 0
            assert store.stats().objects == 2


@pytest.mark.anyio
async def test_check_finds_and_repairs_what_is_doubtful():
    with MemoryDevice() as first, await deleted(first) as device:
        damage(device, KILL_SLOT, 90)
        report = check_device(device)
        assert [problem.damage for problem in report.problems] == [Damage.DOUBTFUL, Damage.TORN_TAIL]
        assert report.problems[0].key == key(1)
        assert check_device(device, repair=True).is_clean
        assert check_device(device).problems == ()
        async with SegmentStore.open(config("unused"), device=device) as store:
            assert await get(store, key(1)) == Status.NOT_FOUND
            assert store.stats().objects == 2


@pytest.mark.anyio
async def test_a_journal_that_has_become_a_terabyte_of_nothing_is_cut(tmp_path):
    """Neither read whole nor kept in memory: no journal has such a gap."""
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20 * KIB) for n in range(3)})
    log = tmp_path / journal_name(1)
    length = log.stat().st_size
    os.truncate(log, 1 << 40)
    began = time.process_time()
    report = check(tmp_path)
    assert [(problem.damage, problem.count) for problem in report.problems] == [
        (Damage.TORN_TAIL, (1 << 40) - length)
    ]
    async with SegmentStore.open(config(tmp_path)) as store:
        assert store.stats().objects == 3
        assert log.stat().st_size == length
    assert time.process_time() - began < 5
