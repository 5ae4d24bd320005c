import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from adp_engines.errors import StagingUnreachable
from adp_engines.staging import Region, SlotPool, slot_bytes_for


@pytest.fixture
def region():
    with_slots = Region.create(slots=4, slot_bytes=8192)
    yield with_slots
    with_slots.close()


def test_slots_do_not_overlap(region: Region) -> None:
    for index in range(4):
        region.slot(index)[:] = bytes([index + 1]) * 8192
    assert [set(bytes(region.slot(index))) for index in range(4)] == [{1}, {2}, {3}, {4}]
    assert bytes(region.memory[8191:8193]) == b"\1\2"


def test_length_cuts_a_slot(region: Region) -> None:
    assert len(region.slot(1, 100)) == 100
    for bad in [(4, 1), (-1, 1), (0, 8193)]:
        with pytest.raises(IndexError):
            region.slot(*bad)


def test_another_process_sees_the_same_bytes(region: Region) -> None:
    region.slot(2)[:5] = b"hello"
    program = (
        "import sys; from adp_engines.staging import Region, RegionName\n"
        "name = RegionName(path=sys.argv[1], inode=int(sys.argv[2]), slots=4, slot_bytes=8192)\n"
        "other = Region.attach(name); print(bytes(other.slot(2, 5)).decode()); other.slot(3)[:1] = b'!'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, region.name.path, str(region.name.inode)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "hello\n"
    assert bytes(region.slot(3, 1)) == b"!"


def test_b55_nothing_is_left_in_a_file_system(region: Region) -> None:
    assert str(Path(region.name.path).readlink()).startswith("/memfd:adp-staging")
    assert Path(region.name.path).stat().st_nlink == 0


def test_name_of_another_region_is_refused(region: Region) -> None:
    for change in [{"inode": region.name.inode + 1}, {"slots": 5}, {"path": "/proc/self/fd/9999"}]:
        with pytest.raises(StagingUnreachable):
            Region.attach(attrs.evolve(region.name, **change))


def test_close_waits_for_the_last_view() -> None:
    region = Region.create(slots=1, slot_bytes=4096)
    view = region.slot(0)
    region.close()
    region.close()
    view[:1] = b"x"
    assert bytes(view[:1]) == b"x"
    with pytest.raises(StagingUnreachable):
        Region.attach(region.name)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 4096), (1, 0), (1, 4095)])
def test_impossible_region(slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="no region of"):
        Region.create(slots=slots, slot_bytes=slot_bytes)


@pytest.mark.parametrize(("size", "slot"), [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)])
def test_slot_bytes(size: int, slot: int) -> None:
    assert slot_bytes_for(size) == slot


def test_pool_hands_out_each_slot_once() -> None:
    pool = SlotPool(5)
    first = pool.take(3)
    assert first is not None
    assert pool.take(3) is None
    second = pool.take(2)
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    pool.give_back(first)
    assert pool.free == 3
    # What was used before is used again first: its memory exists.
    assert set(pool.take(3) or ()) == set(first)


def test_pool_keeps_a_reserve() -> None:
    pool = SlotPool(4)
    assert pool.take(2, keep=2) is not None
    assert pool.take(1, keep=2) is None
    assert pool.take(2) is not None
