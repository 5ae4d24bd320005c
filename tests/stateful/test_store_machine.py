"""The segment store against a dict, through restarts and kills.

The model is tolerant of one thing only: an object may have been evicted, and then it is gone until it is put
again. It may never be wrong, older than the last put, or back after a delete. While it is held it may not
even be gone.
"""

from contextlib import ExitStack

import anyio
import anyio.abc
import attrs
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adp_gateway.device.memory import Command, MemoryDevice
from adp_gateway.fsck import check_device
from adp_gateway.store.base import Hold, ReadLease, Status
from adp_gateway.store.quotas import Account
from adp_gateway.store.segment import object_charge
from adp_gateway.store.segments import SegmentStore
from gateway.objects import (
    KIB,
    NAMESPACE,
    OTHER_NAMESPACE,
    after_kill,
    config,
    get,
    item,
    lease_bytes,
    payload,
)

SMALL = {"segment_bytes": 64 * KIB}
NAMES = [b"a", b"bb", b"ccc", b"dddd", b"eeeee", b"ffffff"]
keys = st.sampled_from(NAMES)
ACCOUNTS = (
    Account(name="here", prefix=NAMESPACE[:8], quota_bytes=100_000),
    Account(name="there", prefix=OTHER_NAMESPACE[:8], quota_bytes=150_000),
)
namespaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE])
lengths = st.sampled_from([0, 1, 4096, 5000, 16 * KIB + 1, 30_000, 60 * KIB])


class StoreMachine(RuleBasedStateMachine):
    backend = "asyncio"

    @initialize(
        durability=st.sampled_from(["relaxed", "durable"]),
        accounts=st.sampled_from([(), ACCOUNTS]),
        segments=st.sampled_from([5, 7]),
    )
    def begin(self, durability: str, accounts: tuple[Account, ...], segments: int) -> None:
        self.stack = ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal(self.backend))
        capacity_bytes = segments * SMALL["segment_bytes"]
        self.settings = config(
            "unused", durability=durability, accounts=accounts, capacity_bytes=capacity_bytes, **SMALL
        )
        self.device = self.stack.enter_context(MemoryDevice(max_command_bytes=16 * KIB))
        self.model: dict[tuple[bytes, bytes], bytes] = {}
        self.leases: list[tuple[ReadLease, bytes]] = []
        self.holds: list[tuple[Hold, bytes, list[bytes]]] = []
        self.puts = 0
        self.open()

    def open(self) -> None:
        self.manager = self.portal.wrap_async_context_manager(
            SegmentStore.open(self.settings, device=self.device)
        )
        self.device.before = self.watch
        self.store = self.manager.__enter__()

    def watch(self, _command: Command) -> None:
        """Before each command of the device: there is never more on it than there may be."""
        assert self.device.used_bytes() <= self.settings.capacity_bytes

    def close(self) -> None:
        for lease, _ in self.leases:
            self.portal.call(lease.release)
        self.leases = []
        self.let_go()
        self.manager.__exit__(None, None, None)

    @rule(namespace=namespaces, names=st.lists(keys, min_size=1, max_size=4), length=lengths)
    def put(self, namespace: bytes, names: list[bytes], length: int) -> None:
        items = []
        for name in names:
            self.puts += 1
            items.append(item(name, payload(self.puts, length)))
        statuses = self.portal.call(self.store.put_many, namespace, items)
        for put, status in zip(items, statuses, strict=True):
            if status == Status.OK:
                self.model[namespace, put.key] = bytes(put.data)
            elif status == Status.TOO_LARGE:
                assert any(object_charge(length) > account.quota_bytes for account in self.settings.accounts)
            else:
                assert status == Status.CAPACITY_EXHAUSTED
                assert self.leases or self.holds, "only leases may keep the store from making room"

    @rule(namespace=namespaces, name=keys)
    def read(self, namespace: bytes, name: bytes) -> None:
        found = self.portal.call(get, self.store, name, namespace)
        if found == Status.NOT_FOUND:
            self.model.pop((namespace, name), None)
        else:
            assert found == self.model[namespace, name]

    @rule(namespace=namespaces)
    def read_all(self, namespace: bytes) -> None:
        """So that whole segments are marked, and kept."""
        for lease in self.portal.call(self.store.open_read, namespace, NAMES):
            if lease is not None:
                self.portal.call(lease.release)

    @rule(namespace=namespaces, number=st.integers(1, 12))
    def scan(self, namespace: bytes, number: int) -> None:
        """Much that nobody asks for again."""
        for n in range(number):
            self.put(namespace, [b"scan%d" % n], 30_000)

    @rule(namespace=namespaces, name=keys)
    def lease(self, namespace: bytes, name: bytes) -> None:
        (lease,) = self.portal.call(self.store.open_read, namespace, [name])
        if lease is not None:
            self.leases.append((lease, self.model[namespace, name]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            lease, _ = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
            self.portal.call(lease.release)

    @rule(namespace=namespaces, names=st.lists(keys, max_size=4))
    def hold(self, namespace: bytes, names: list[bytes]) -> None:
        statuses, hold = self.portal.call(self.store.hold, namespace, names)
        here = [name for name, status in zip(names, statuses, strict=True) if status == Status.OK]
        assert hold.items == len(here)
        assert all((namespace, name) in self.model for name in here)
        self.holds.append((hold, namespace, here))

    @rule(data=st.data())
    def end_hold(self, data: st.DataObject) -> None:
        if self.holds:
            hold, _, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
            self.portal.call(hold.release)

    def let_go(self) -> None:
        for hold, _, _ in self.holds:
            self.portal.call(hold.release)
        self.holds = []

    @rule(namespace=namespaces, names=st.lists(keys, max_size=3))
    def delete(self, namespace: bytes, names: list[bytes]) -> None:
        async def delete_and_release() -> bytes:
            async with anyio.create_task_group() as tasks:
                statuses: list[bytes] = []

                async def delete(*, task_status: anyio.abc.TaskStatus[None]) -> None:
                    task_status.started()
                    statuses.append(await self.store.delete_many(namespace, names))

                await tasks.start(delete)  # the delete comes first, and waits if there is a lease or a hold
                held = {name for _, space, names in self.holds for name in names if space == namespace}
                assert self.store.exist(namespace, list(held)) == bytes(len(held))
                assert self.store.hold(namespace, names)[1].items == 0
                for lease, _ in self.leases:
                    lease.release()
                for each, _, _ in self.holds:
                    each.release()
            return statuses[0]

        statuses = self.portal.call(delete_and_release)
        self.leases = []
        self.holds = []
        for name, status in zip(names, statuses, strict=True):
            if status == Status.OK:
                assert (namespace, name) in self.model
            self.model.pop((namespace, name), None)

    @rule()
    def flush(self) -> None:
        self.portal.call(self.store.flush)

    @rule()
    def restart(self) -> None:
        self.close()
        assert check_device(self.device).is_clean
        self.open()

    @rule()
    def kill(self) -> None:
        image = self.stack.enter_context(after_kill(self.device))
        self.close()
        self.device = image
        self.open()

    @rule(half=st.booleans())
    def restart_with_other_quotas(self, half: bool) -> None:
        self.close()
        accounts = tuple(
            attrs.evolve(account, quota_bytes=original.quota_bytes // (2 if half else 1))
            for account, original in zip(self.settings.accounts, ACCOUNTS, strict=False)
        )
        self.settings = attrs.evolve(self.settings, accounts=accounts)
        self.open()

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "store"):
            return
        for lease, expected in self.leases:
            assert lease_bytes(lease) == expected
        stats = self.store.stats()
        for queue in {
            segment.queue for segment in self.store._catalog.segments.values() if segment.is_sealed
        }:
            event(f"sealed segments in {queue}")
        if stats.moved_objects:
            event("survivors written again")
        assert stats.leases == len(self.leases)
        assert stats.held_items == sum(len(names) for _, _, names in self.holds)
        for _, namespace, names in self.holds:
            assert self.store.exist(namespace, names) == bytes(len(names))
        assert stats.corrupt_objects == stats.faulted_objects == 0
        assert self.device.used_bytes() <= stats.used_bytes <= stats.capacity_bytes
        present = 0
        for (namespace, name), data in list(self.model.items()):
            if self.store.exist(namespace, [name]) == bytes([Status.OK]):
                present += len(data)
            else:
                del self.model[namespace, name]
        assert (stats.objects, stats.object_bytes) == (len(self.model), present)
        for account, found in zip(self.settings.accounts, stats.accounts, strict=True):
            own = [data for (namespace, _), data in self.model.items() if namespace[:8] == account.prefix]
            assert found.objects == len(own)
            assert found.used_bytes == sum(object_charge(len(data)) for data in own)
            assert found.used_bytes <= account.quota_bytes

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.close()
            self.stack.close()


class TrioStoreMachine(StoreMachine):
    backend = "trio"


SETTINGS = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.timeout(120)
class TestStoreOnAsyncio(StoreMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(120)
class TestStoreOnTrio(TrioStoreMachine.TestCase):
    settings = SETTINGS
