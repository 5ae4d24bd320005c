"""What the store says of its device: every failure counted, few lines, and when it counts as failing."""

import logging

import pytest

from adp_gateway.device.plain import PlainFile
from adp_gateway.errors import DeviceFault, DeviceFull
from adp_gateway.store.base import Status
from adp_gateway.store.segments import SegmentStore
from adp_gateway.store.troubles import MEMORY_SECONDS, OPERATIONS, Troubles
from gateway.objects import config, key, payload, put, put_all
from gateway.objects import get as read


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_every_failure_is_counted_and_few_are_told(caplog: pytest.LogCaptureFixture) -> None:
    troubles = Troubles(logging.getLogger("adp_gateway.tests"), clock := Clock())
    assert troubles.errors == dict.fromkeys(OPERATIONS, 0)
    for n in range(1000):
        troubles.failed("write", "the device cannot write", DeviceFault(f"block {n}"), count=2)
    troubles.failed("sync", "the device did not confirm writes", DeviceFault("EIO"))
    clock.now += 10
    troubles.failed("write", "the device cannot write", DeviceFault("again"))
    assert troubles.errors["write"] == 2001
    assert caplog.messages == [
        "store: the device cannot write: block 0",
        "store: the device did not confirm writes: EIO",
        "store: the device cannot write: again (and 999 times more from there since the last line about it)",
    ]


def test_it_fails_until_it_does_the_same_again_or_long_enough_ago() -> None:
    troubles = Troubles(logging.getLogger("adp_gateway.tests"), clock := Clock())
    assert troubles.failing is None
    troubles.failed("write", "no room", DeviceFull("full"))
    assert troubles.failing is None, "a full device works"
    troubles.failed("write", "the device cannot write", DeviceFault("EIO"))
    assert troubles.failing == "the device cannot write: EIO"
    troubles.worked("read")
    assert troubles.failing is not None
    troubles.worked("write")
    assert troubles.failing is None
    troubles.failed("read", "the device cannot read")
    assert troubles.failing == "the device cannot read"
    clock.now += MEMORY_SECONDS
    assert troubles.failing is not None
    clock.now += 1
    assert troubles.failing is None


@pytest.mark.anyio
async def test_a_store_whose_device_fails_says_so_until_it_works_again(tmp_path, monkeypatch) -> None:
    def broken(*_: object, **_options: object) -> int:
        raise DeviceFault("read: Input/output error")

    async with SegmentStore.open(config(tmp_path, io="buffered")) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(30)})
        assert store.trouble is None
        with monkeypatch.context() as patch:
            patch.setattr(PlainFile, "read_into", broken)
            for n in range(20):
                assert await read(store, key(n)) == Status.GATEWAY_FAULT
        stats = store.stats()
        assert (stats.device_errors["read"], stats.faulted_objects) == (20, 20)
        assert store.trouble == "the device cannot read"
        assert await read(store, key(25)) == payload(25, 5000)
        assert store.trouble is None
        with monkeypatch.context() as patch:
            patch.setattr(PlainFile, "write_extents", broken)
            assert await put(store, key(40), b"x") == Status.GATEWAY_FAULT
        assert store.trouble == "the device cannot write"
        while await put(store, key(40), b"x") != Status.OK:
            pass
        assert store.trouble is None


@pytest.mark.anyio
async def test_many_damaged_objects_make_few_lines(tmp_path, caplog) -> None:
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(50)})
        for data in tmp_path.glob("*.data"):
            data.write_bytes(bytes(data.stat().st_size))
        for n in range(50):
            assert await read(store, key(n)) == Status.CORRUPT
        assert store.stats().corrupt_objects == 50
    assert len([line for line in caplog.messages if "corrupt" in line]) == 1
