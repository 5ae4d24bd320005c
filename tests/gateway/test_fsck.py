"""`check`: finds what is wrong, changes nothing unless told to, and leaves a whole store when it is."""

import pytest

from adp_gateway.errors import CorruptRecord, StorageError, StoreLocked
from adp_gateway.fsck import Damage, check
from adp_gateway.store.base import Status
from adp_gateway.store.format import RECORD_BYTES
from adp_gateway.store.segments import SegmentStore
from gateway.objects import config, get, key, payload, put, put_all

pytestmark = pytest.mark.anyio


def image(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def fill(directory) -> None:
    async with SegmentStore.open(config(directory)) as store:
        await put_all(store, {key(n): payload(n, 50_000) for n in range(4)})


async def test_a_sound_store_is_clean(tmp_path):
    await fill(tmp_path)
    before = image(tmp_path)
    report = check(tmp_path, repair=True)
    assert report.is_clean
    assert (report.segments, report.objects, report.object_bytes, report.problems) == (1, 4, 200_000, ())
    assert image(tmp_path) == before


async def test_damage_is_found_by_kind_and_repaired_on_demand(tmp_path):
    await fill(tmp_path)
    data, log = tmp_path / "seg-00000001.data", tmp_path / "seg-00000001.log"
    raw = bytearray(data.read_bytes())
    raw[53248 + 7] ^= 1  # object 1
    data.write_bytes(raw[: 3 * 53248 + 49_999])  # object 3
    records = bytearray(log.read_bytes())
    records[RECORD_BYTES + 50] ^= 3  # the commit of object 0
    records[3 * RECORD_BYTES + 50] ^= 2  # that of object 2
    log.write_bytes(records + b"torn")
    (tmp_path / "seg-00000009.data").write_bytes(b"left over")
    before = image(tmp_path)

    report = check(tmp_path)
    assert image(tmp_path) == before
    assert not report.is_clean
    assert report.objects == 1
    assert [(problem.damage, problem.key) for problem in report.problems] == [
        (Damage.MISSING, key(3)),
        (Damage.CORRUPT, key(1)),
        (Damage.FLIPPED_BIT, b""),
        (Damage.DAMAGED_RECORD, b""),
        (Damage.TORN_TAIL, b""),
        (Damage.HALF_SEGMENT, b""),
    ]
    assert "segment 1 at 53248: bytes and checksum disagree (object 00010203" in str(report.problems[1])
    assert (
        str(report.problems[4]) == "segment 1 at 960: the journal ends in bytes that are no record (4 found)"
    )

    repaired = check(tmp_path, repair=True)
    assert repaired.repaired == len(repaired.problems)
    assert check(tmp_path).problems == ()
    async with SegmentStore.open(config(tmp_path)) as store:
        found = [await get(store, key(n)) for n in range(4)]
        assert found == [Status.NOT_FOUND, Status.NOT_FOUND, payload(2, 50_000), Status.NOT_FOUND]
        assert await put(store, key(5), payload(5, 1000)) == Status.OK
    async with SegmentStore.open(config(tmp_path)) as store:
        assert await get(store, key(5)) == payload(5, 1000)


async def test_not_under_a_running_gateway(tmp_path):
    async with SegmentStore.open(config(tmp_path)):
        with pytest.raises(StoreLocked):
            check(tmp_path)


def test_not_where_there_is_no_store(tmp_path):
    with pytest.raises(StorageError, match="is not a directory"):
        check(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(CorruptRecord, match="not a store"):
        check(tmp_path)
