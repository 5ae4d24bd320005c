"""Many at once: slow ones, dying ones, too many of them, and the end of the gateway."""

from collections.abc import Sequence

import anyio
import attrs
import pytest
from anyio.lowlevel import checkpoint

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    Hello,
    Limits,
    Ping,
    Read,
    StatusReply,
    Write,
)
from adp_client.protocol.state import State
from adp_gateway.errors import CorruptRecord, DeviceFault, DeviceFull
from adp_gateway.outbox import FRAME_OVERHEAD_BYTES, MAX_REPLY_BYTES
from adp_gateway.shared import Patience
from adp_gateway.store.base import Extent, PutItem, ReadLease
from adp_gateway.store.memory import MemoryStore

from .house import House, house
from .peer import NAMESPACE, Closed, Peer, content, cut_write, key_of
from .waiting import jump, on_a_jumping_clock, on_a_still_clock, until

pytestmark = pytest.mark.anyio

OK, NOT_FOUND, OVERLOADED = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.OVERLOADED
KIB, MIB = 1 << 10, 1 << 20


def read(*keys: bytes, capacity: int = 2 * MIB) -> Read:
    return Read(namespace=NAMESPACE, keys=keys, capacities=(capacity,) * len(keys))


# ---------------------------------------------------------------- readers


async def test_a_slow_reader_makes_nothing_pile_up() -> None:
    """Its objects wait in the store; other clients do not notice."""
    async with house(max_queued_bytes=2 * MIB) as home:
        slow, quick = await home.connect(), await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(24)}
        assert await slow.write(objects) == [OK] * 24
        asked = [await slow.ask(read(*objects)) for _ in range(3)]
        for _ in range(3):
            assert await quick.read(*objects) == list(objects.values())
        assert 0 < home.sessions[0]._outbox.queued_bytes <= 8 * MIB  # one frame
        for request_id in asked:
            assert (await slow.answer(request_id)).payloads() == list(objects.values())


async def test_short_replies_overtake_objects() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(n): content(MIB, seed=n) for n in range(16)})
        request_id = await peer.ask(read(*map(key_of, range(16))))
        await until(lambda: home.sessions[0]._outbox.queued_bytes)
        await peer.call(Ping(nonce=1))
        assert request_id not in peer.done
        assert len((await peer.answer(request_id)).payloads()) == 16


async def test_a_reader_that_dies_gives_its_leases_back() -> None:
    async with house() as home:
        peer, other = await home.connect(), await home.connect()
        await peer.write({key_of(n): content(MIB, seed=n) for n in range(16)})
        await peer.ask(read(*map(key_of, range(16))))
        await until(lambda: home.store.stats().leases)
        delete = await other.ask(Delete(namespace=NAMESPACE, keys=(key_of(15),)))
        await until(lambda: home.store.stats().objects == 15)
        await peer.transport.aclose()
        assert (await other.answer(delete)).statuses == [OK]


async def test_delete_waits_for_a_reader_and_a_reader_after_it_misses() -> None:
    async with house(max_queued_bytes=MIB) as home:
        reader, other = await home.connect(), await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(8)}
        await reader.write(objects)
        reading = await reader.ask(read(*objects))
        await until(lambda: home.store.stats().leases)
        delete = await other.ask(Delete(namespace=NAMESPACE, keys=(key_of(7),)))
        assert await other.read(key_of(7)) == [None]
        new = content(MIB, seed=99)
        assert await other.write({key_of(7): new}) == [OK]
        assert delete not in other.done
        assert (await reader.answer(reading)).payloads() == list(objects.values())
        assert (await other.answer(delete)).statuses == [OK]
        assert await other.read(key_of(7)) == [new]


@attrs.define
class CutLease:
    """Promises more than its file has, as one would whose file was cut by somebody else."""

    whole: ReadLease

    @property
    def length(self) -> int:
        return self.whole.length

    @property
    def checksum(self) -> int:
        return self.whole.checksum

    @property
    def extents(self) -> tuple[Extent, ...]:
        (extent,) = self.whole.extents
        return (Extent(extent.fd, extent.offset + 1000, extent.length),)

    def release(self) -> None:
        self.whole.release()


class CutStore(MemoryStore):
    """The object `key_of(1)` is cut between its check and its way out."""

    def open_read(self, namespace: bytes, keys: Sequence[bytes]) -> list[ReadLease | None]:
        leases = super().open_read(namespace, keys)
        return [
            CutLease(lease) if lease and key == key_of(1) else lease
            for key, lease in zip(keys, leases, strict=True)
        ]

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        return await super().verify([getattr(lease, "whole", lease) for lease in leases])


async def test_a_file_that_fails_in_the_middle_of_a_frame_ends_that_connection_only() -> None:
    async with house(CutStore()) as home:
        bad, good = await home.connect(), await home.connect()
        await good.write({key_of(1): content(400_000), key_of(2): b"fine"})
        await bad.ask(read(key_of(1)))
        assert await bad.closed() == []
        assert await good.read(key_of(2)) == [b"fine"]


# ---------------------------------------------------------------- writers


@pytest.mark.parametrize("frames", [1, 2, 3])
async def test_a_writer_that_dies_leaves_nothing(frames: int) -> None:
    async with house() as home:
        dying, other = await home.connect(), await home.connect()
        data = content(int(3.4 * MIB))
        await dying.ask_write({key_of(1): data}, frames=frames)
        await until(lambda: home.shared.arena.used_bytes >= len(data))
        assert await other.exist(key_of(1)) == [NOT_FOUND]
        await dying.transport.aclose()
        await home.ended[0].wait()
        assert home.shared.arena.used_bytes == 0
        assert await other.exist(key_of(1)) == [NOT_FOUND]
        assert await other.write({key_of(1): b"again"}) == [OK]


async def test_a_writer_that_dies_inside_a_frame() -> None:
    async with house() as home:
        dying, other = await home.connect(), await home.connect()
        (keys, items, parts), *_ = cut_write({key_of(1): content(MIB)}, MIB)

        _, raw = dying.connection.request(Write(namespace=NAMESPACE, keys=keys, items=items))
        await dying.transport.send([raw, parts[0][:700_000]])
        await until(lambda: home.shared.arena.used_bytes)
        await dying.transport.aclose()
        await home.ended[0].wait()
        assert home.shared.arena.used_bytes == 0
        assert await other.exist(key_of(1)) == [NOT_FOUND]


async def test_two_writers_of_one_key() -> None:
    """Frame by frame in turn: the object is exactly one of the two."""
    async with house() as home:
        peers = [await home.connect(), await home.connect()]
        objects = [content(3 * MIB), content(int(2.5 * MIB), seed=1)]

        ids: list[int | None] = [None, None]
        cut = [cut_write({key_of(1): data}, MIB) for data in objects]
        for step in range(3):
            for who, peer in enumerate(peers):
                keys, items, parts = cut[who][step]
                ids[who], raw = peer.connection.request(
                    Write(namespace=NAMESPACE, keys=keys, items=items),
                    request_id=ids[who],
                    is_final=step == 2,
                )
                await peer.transport.send([raw, *parts])
        for peer, request_id in zip(peers, ids, strict=True):
            assert request_id is not None
            assert (await peer.answer(request_id)).statuses == [OK]
        assert (await peers[0].read(key_of(1)))[0] in objects


async def test_waiting_for_memory_holds_up_one_connection_only() -> None:
    limits = Limits(max_payload_bytes=MIB, max_object_bytes=2 * MIB)
    patience = Patience(memory_seconds=10)
    async with house(limits=limits, arena_bytes=2 * MIB, patience=patience) as home:
        holder, waiter, third = [await home.connect() for _ in range(3)]
        big = content(2 * MIB)
        (first, second) = cut_write({key_of(1): big}, MIB)

        request_id, raw = holder.connection.request(
            Write(namespace=NAMESPACE, keys=first[0], items=first[1]), is_final=False
        )
        await holder.transport.send([raw, *first[2]])
        await until(lambda: home.shared.arena.used_bytes)
        waiting = await waiter.ask_write({key_of(2): content(1000)})
        await until(lambda: home.shared.arena.waiting)
        assert await third.exist(key_of(1), key_of(2)) == [NOT_FOUND, NOT_FOUND]
        _, raw = holder.connection.request(
            Write(namespace=NAMESPACE, keys=second[0], items=second[1]), request_id=request_id
        )
        await holder.transport.send([raw, *second[2]])
        assert (await holder.answer(request_id)).statuses == [OK]
        assert (await waiter.answer(waiting)).statuses == [OK]
        assert await third.read(key_of(1), key_of(2)) == [big, content(1000)]


async def test_who_waits_for_memory_and_dies_takes_none() -> None:
    limits = Limits(max_payload_bytes=MIB, max_object_bytes=2 * MIB)
    async with house(limits=limits, arena_bytes=2 * MIB) as home:
        holder, waiter = await home.connect(), await home.connect()
        await holder.ask_write({key_of(1): content(2 * MIB)}, frames=1)
        await until(lambda: home.shared.arena.used_bytes)
        await waiter.ask_write({key_of(2): content(1000)})
        await until(lambda: home.shared.arena.waiting)
        home.sessions[1]._over.cancel()  # as the server does when the grace time is over
        await home.ended[1].wait()
        assert home.shared.arena.waiting == 0


async def test_two_that_hold_and_want_more_do_not_wait_for_each_other() -> None:
    """Each has part of an object, and its next frame needs what the other holds."""
    limits = Limits(max_payload_bytes=MIB, max_object_bytes=2 * MIB)
    patience = Patience(memory_seconds=0.05)
    async with house(limits=limits, arena_bytes=3 * MIB, patience=patience) as home:
        peers = [await home.connect(), await home.connect()]

        async def write(peer: Peer, base: int) -> None:
            objects = {key_of(base + n): content(int(1.5 * MIB), seed=base + n) for n in range(6)}
            statuses = await peer.write(objects)
            assert set(statuses) <= {OK, OVERLOADED}
            stored = zip(objects.values(), statuses, strict=True)
            assert await peer.read(*objects) == [data if status == OK else None for data, status in stored]

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for base, peer in enumerate(peers):
                    tasks.start_soon(write, peer, 100 * base)


async def stall(home: House, count: int, *, object_bytes: int) -> list[Peer]:
    """Clients that begin a WRITE of a large object and fall silent in its first frame."""
    peers = [await home.connect() for _ in range(count)]
    for peer in peers:
        (keys, items, parts), *_ = cut_write({key_of(666): content(object_bytes)}, 64 * KIB)
        message = Write(namespace=NAMESPACE, keys=keys, items=items)
        _, raw = peer.connection.request(message, is_final=False)
        await peer.transport.send([raw, parts[0][:1000]])
    return peers


STALLERS = {"limits": Limits(max_payload_bytes=64 * KIB, max_object_bytes=240 * KIB), "arena_bytes": 2 * MIB}


async def test_stalled_writers_do_not_hold_up_what_needs_no_memory() -> None:
    """Nine hold, or wait for, all the memory. A healthy client is refused its writes, nothing else."""
    async with house(**STALLERS, patience=Patience(memory_seconds=0.02)) as home:
        healthy = await home.connect()
        base = content(200 * KIB)
        assert await healthy.write({key_of(1): base}) == [OK]
        await stall(home, 9, object_bytes=240 * KIB)
        await until(lambda: home.shared.arena.used_bytes == 8 * 240 * KIB)
        for turn in range(5):
            # Four frames: each of them needs memory.
            write = await healthy.ask_write({key_of(2): content(200 * KIB, seed=turn)})
            exist = await healthy.ask(Exist(namespace=NAMESPACE, keys=(key_of(1), key_of(2))))
            reading = await healthy.ask(read(key_of(1)))
            ping = await healthy.ask(Ping(nonce=turn))
            assert (await healthy.answer(exist)).statuses == [OK, NOT_FOUND]
            assert (await healthy.answer(reading)).payloads() == [base]
            await healthy.answer(ping)
            (refusal,) = (await healthy.answer(write)).frames
            assert refusal == StatusReply(status=OVERLOADED, retry_after_ms=100)
        assert not home.ended[0].is_set()


@on_a_jumping_clock
async def test_a_connection_spends_at_most_half_its_time_waiting_for_memory() -> None:
    async with house(**STALLERS) as home:
        healthy = await home.connect()
        await stall(home, 9, object_bytes=240 * KIB)
        await anyio.wait_all_tasks_blocked()
        writes = [await healthy.ask_write({key_of(n): content(200 * KIB)}) for n in range(8)]
        start = anyio.current_time()
        assert await healthy.exist(key_of(1)) == [NOT_FOUND]
        assert anyio.current_time() - start < 1
        for write in writes:
            assert (await healthy.answer(write)).status is OVERLOADED


@on_a_still_clock
async def test_who_keeps_memory_from_others_for_a_trickle_is_cut() -> None:
    """A byte now and then is no progress while others are refused their writes."""
    async with house(**STALLERS, patience=Patience(memory_seconds=1, stall_seconds=5)) as home:
        healthy = await home.connect()
        peers = await stall(home, 8, object_bytes=240 * KIB)
        arena, holders = home.shared.arena, home.sessions[1:]
        await until(lambda: arena.used_bytes == 8 * 240 * KIB)
        for _ in range(2):
            write = await healthy.ask_write({key_of(2): content(200 * KIB)})
            await until(lambda: arena.waiting)
            jump(1)
            assert (await healthy.answer(write)).status is OVERLOADED
            before = sum(session._received_bytes for session in holders)
            for peer in peers:
                await peer.transport.send([b"x"])
            await until(lambda before=before: sum(s._received_bytes for s in holders) == before + 8)
            jump(1.5)
        assert await healthy.write({key_of(2): content(200 * KIB)}) == [OK]


@on_a_still_clock
async def test_who_keeps_memory_from_others_and_falls_silent_is_cut() -> None:
    patience = Patience(memory_seconds=1, stall_seconds=5, trickle_bytes_per_second=0.1)
    async with house(**STALLERS, patience=patience) as home:
        healthy = await home.connect()
        silent = await stall(home, 8, object_bytes=240 * KIB)
        slow = silent.pop()
        await until(lambda: home.shared.arena.used_bytes == 8 * 240 * KIB)
        jump(20)  # in nobody's way
        for _ in range(2):
            write = await healthy.ask_write({key_of(2): content(200 * KIB)})
            await until(lambda: home.shared.arena.waiting)
            jump(1)
            assert (await healthy.answer(write)).status is OVERLOADED
            before = home.sessions[8]._received_bytes
            await slow.transport.send([b"x"])
            await until(lambda before=before: home.sessions[8]._received_bytes > before)
            jump(1.5)
            assert not any(ended.is_set() for ended in home.ended)
        assert await healthy.write({key_of(2): content(200 * KIB)}) == [OK]
        assert await healthy.exist(key_of(2)) == [OK]
        for peer in silent:
            await peer.closed()
        jump(1)  # nobody reads the ERROR of who was cut
        for ended in home.ended[1:8]:
            await ended.wait()
        assert [ended.is_set() for ended in home.ended] == [False, *[True] * 7, False]
        assert home.shared.counters.violations == {"TIMED_OUT": 7}


# ---------------------------------------------------------------- fences


async def test_a_fence_in_the_middle_of_a_write() -> None:
    """The WRITE came before it, so its later frames do; what comes after the FENCE waits for them."""
    async with house() as home:
        peer = await home.connect()
        old, new, next_ = content(10), content(2 * MIB), content(100_000, seed=3)
        await peer.write({key_of(1): old})
        first, second = cut_write({key_of(1): new}, MIB)

        write, raw = peer.connection.request(
            Write(namespace=NAMESPACE, keys=first[0], items=first[1]), is_final=False
        )
        await peer.transport.send([raw, *first[2]])
        fence = await peer.ask(Fence())
        reading = await peer.ask(read(key_of(1)))
        exist = await peer.ask(Exist(namespace=NAMESPACE, keys=(key_of(1),)))
        later = await peer.ask_write({key_of(2): next_})
        second_fence = await peer.ask(Fence())
        last = await peer.ask(read(key_of(2)))
        await until(lambda: home.sessions[0]._connection.in_flight == 7)
        assert home.store.stats().stored_objects == 1
        _, raw = peer.connection.request(
            Write(namespace=NAMESPACE, keys=second[0], items=second[1]), request_id=write
        )
        await peer.transport.send([raw, *second[2]])
        assert (await peer.answer(last)).payloads() == [next_]
        assert (await peer.answer(reading)).payloads() == [new]
        for request_id in (write, exist, later):
            assert (await peer.answer(request_id)).statuses == [OK]
        for request_id in (fence, second_fence):
            assert (await peer.answer(request_id)).frames == [StatusReply()]


async def test_a_writer_that_dies_behind_a_fence() -> None:
    async with house(max_queued_bytes=MIB) as home:
        reader, peer = await home.connect(), await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(8)}
        await reader.write(objects)
        await reader.ask(read(*objects))
        await until(lambda: home.store.stats().leases)
        await peer.ask(Delete(namespace=NAMESPACE, keys=(key_of(7),)))
        await peer.ask(Fence())
        await peer.ask_write({key_of(9): content(1000)})
        await until(lambda: home.sessions[1]._connection.in_flight == 3)
        await peer.transport.aclose()
        await reader.transport.aclose()
        await home.all_over()
        assert home.store.exist(NAMESPACE, [key_of(9)]) == bytes([NOT_FOUND])


# ---------------------------------------------------------------- the gateway's own trouble


async def test_overload_is_answered_and_passes() -> None:
    async with house(request_bytes=6000, max_queued_bytes=MIB) as home:
        busy, other = await home.connect(), await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(8)}
        await busy.write(objects)
        reading = await busy.ask(read(*objects))
        await until(lambda: home.shared.admission.used_bytes)
        keys = tuple(map(key_of, range(8)))
        for message in (
            read(*keys),
            Delete(namespace=NAMESPACE, keys=keys),
            Check(namespace=NAMESPACE, keys=keys),
        ):
            answer = await other.call(message)
            assert answer.status is OVERLOADED
            assert answer.frames[0].retry_after_ms > 0  # type: ignore[union-attr]
        write = await other.ask_write({key_of(n): content(1000) for n in range(100, 108)})
        assert (await other.answer(write)).status is OVERLOADED
        assert await other.exist(key_of(1), key_of(100)) == [OK, NOT_FOUND]
        assert (await busy.answer(reading)).payloads() == list(objects.values())
        assert await other.read(*keys) == list(objects.values())


class FaultyStore(MemoryStore):
    """Raises what it is told to, in every verb."""

    failure: Exception | None = None

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        self._fail()
        return super().exist(namespace, keys)

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        await checkpoint()
        self._fail()
        return await super().verify(leases)

    async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
        await checkpoint()
        self._fail()
        return await super().put_many(namespace, items)

    async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        self._fail()
        return await super().delete_many(namespace, keys)

    async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        self._fail()
        return await super().check_many(namespace, keys)


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (RuntimeError("a bug"), ErrorCode.GATEWAY_FAULT),
        (DeviceFault("EIO"), ErrorCode.GATEWAY_FAULT),
        (DeviceFull("ENOSPC"), ErrorCode.CAPACITY_EXHAUSTED),
        (CorruptRecord("torn"), ErrorCode.CORRUPT),
    ],
)
async def test_a_failure_in_one_request_is_its_answer(
    failure: Exception, code: ErrorCode, caplog: pytest.LogCaptureFixture
) -> None:
    store = FaultyStore()
    async with house(store) as home:
        peer = await home.connect()
        await peer.write({key_of(1): b"here"})
        store.failure = failure
        keys = (key_of(1),)
        for message in (
            read(*keys),
            Delete(namespace=NAMESPACE, keys=keys),
            Check(namespace=NAMESPACE, keys=keys),
            Exist(namespace=NAMESPACE, keys=keys),
        ):
            assert (await peer.call(message)).status is code
        assert await peer.write({key_of(2): b"there"}) == [code]
        store.failure = None
        assert await peer.read(key_of(1), key_of(2)) == [b"here", None]
        assert home.shared.counters.faults == 5
    with_traceback = [record for record in caplog.records if record.exc_info]
    assert len(with_traceback) == (1 if isinstance(failure, RuntimeError) else 0)  # and four times more


class SecondVerifyFails(MemoryStore):
    verifies = 0

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        self.verifies += 1
        if self.verifies == 2:
            raise DeviceFault("EIO")
        return await super().verify(leases)


async def test_a_failure_after_part_of_a_read_was_sent() -> None:
    async with house(SecondVerifyFails()) as home:
        peer = await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(8)}
        await peer.write(objects)
        answer = await peer.call(read(*objects))
        assert len(answer.objects) > 0
        assert len(answer.frames) == 2
        assert answer.status is ErrorCode.GATEWAY_FAULT
        assert await peer.read(*objects) == list(objects.values())


async def test_no_room() -> None:
    async with house(MemoryStore(capacity_bytes=MIB)) as home:
        peer = await home.connect()
        assert await peer.write({key_of(1): content(700 * KIB)}) == [OK]
        lease = home.store.open_read(NAMESPACE, [key_of(1)])[0]
        assert await peer.write({key_of(2): content(700 * KIB)}) == [ErrorCode.CAPACITY_EXHAUSTED]
        assert await peer.read(key_of(1), key_of(2)) == [content(700 * KIB), None]
        lease.release()
        assert await peer.write({key_of(2): content(700 * KIB)}) == [OK]


# ---------------------------------------------------------------- the end


async def test_drain_tells_the_client_and_lets_it_leave() -> None:
    async with house(max_queued_bytes=MIB) as home:
        idle, busy = await home.connect(), await home.connect()
        objects = {key_of(n): content(MIB, seed=n) for n in range(8)}
        await busy.write(objects)
        reading = await busy.ask(read(*objects))
        await until(lambda: home.store.stats().leases)
        for session in home.sessions:
            session.drain()
        for peer in (idle, busy):
            while not peer.notices:
                await peer.event()
            assert peer.notices == [Goodbye(code=ErrorCode.SHUTTING_DOWN)]
        assert (await busy.answer(reading)).payloads() == list(objects.values())
        for peer in (idle, busy):
            await peer.leave()
            with pytest.raises(Closed):
                await peer.event()
        await home.all_over()


@on_a_jumping_clock
async def test_drain_hangs_up_on_who_does_not_leave() -> None:
    async with house() as home:
        peer = await home.connect()
        silent = home.dial()
        await anyio.wait_all_tasks_blocked()
        start = anyio.current_time()
        for session in home.sessions:
            session.drain()
        # What crossed the notice is still answered.
        assert (await peer.call(Ping(nonce=5))).frames
        assert len(await peer.closed()) == 1
        assert await silent.receive_some([memoryview(bytearray(9))]) == 0
        await home.all_over()
        assert anyio.current_time() - start < 5


@on_a_jumping_clock
async def test_a_reader_that_takes_nothing_for_too_long_is_cut() -> None:
    async with house(patience=Patience(send_seconds=50), max_queued_bytes=4 * KIB) as home:
        peer = await home.connect()
        objects = {key_of(n): content(3 * KIB) for n in range(200)}
        for key, data in objects.items():
            await peer.write({key: data})
        start = anyio.current_time()
        await peer.ask(read(*objects, capacity=MIB))
        await home.ended[0].wait()
        assert 50 <= anyio.current_time() - start < 60


async def test_exist_reply_is_one_frame() -> None:
    async with house() as home:
        peer = await home.connect()
        answer = await peer.call(Exist(namespace=NAMESPACE, keys=tuple(map(key_of, range(10_000)))))
        assert [type(frame) for frame in answer.frames] == [ExistReply]


@pytest.mark.parametrize("verb", ["read", "write", "check", "delete"])
async def test_a_client_that_leaves_in_the_moment_of_its_answer(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The store has just finished, the reader has just seen the end: nobody is told, and nothing breaks."""

    class SlowStore(MemoryStore):
        finished = anyio.Event()

        async def _hold(self) -> None:
            with anyio.CancelScope(shield=True):  # as device work that has begun
                await self.finished.wait()

        async def verify(self, leases: Sequence[ReadLease]) -> bytes:
            await self._hold()
            return await super().verify(leases)

        async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
            if verb == "write":
                await self._hold()
            return await super().put_many(namespace, items)

        async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
            await self._hold()
            return bytes(len(keys))

        async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
            await self._hold()
            return bytes(len(keys))

    store = SlowStore()
    async with house(store) as home:
        peer = await home.connect()
        keys = (key_of(1),)
        match verb:
            case "write":
                await peer.ask_write({key_of(1): b"late"})
            case "read":
                await peer.write({key_of(1): b"late"})
                await peer.ask(read(*keys))
            case "check":
                await peer.ask(Check(namespace=NAMESPACE, keys=keys))
            case _:
                await peer.ask(Delete(namespace=NAMESPACE, keys=keys))
        await until(lambda: home.sessions[0]._fences.current.active)
        session = home.sessions[0]
        # Both at once: the answer is ready, and the stream has ended.
        await peer.transport.aclose()
        await until(lambda: session._answers.is_over)
        store.finished.set()
        await home.all_over()
    assert [record for record in caplog.records if record.exc_info] == []


async def test_connections_share_what_may_be_in_flight() -> None:
    """CREDIT for those who have agreed on it; a connection that leaves gives its share back."""
    limits = Limits(max_requests=64, max_inflight_bytes=1 << 20)
    async with house(limits=limits, inflight_bytes=1 << 20) as home:
        hello = Hello(features=Feature.CREDITS)
        first = await home.connect(hello)
        await home.connect()  # has not agreed, and is not counted
        others = [await home.connect(hello) for _ in range(3)]
        await first.call(Ping())
        assert first.notices == [
            Credit(requests=64, inflight_bytes=1 << 19),
            Credit(requests=64, inflight_bytes=1 << 18),
        ]
        await others[-1].call(Ping())
        assert others[-1].notices == [Credit(requests=64, inflight_bytes=1 << 18)]
        for peer in others:
            await peer.transport.aclose()
        for over in home.ended[2:]:
            await over.wait()
        await first.call(Ping())
        assert first.notices[-1] == Credit(requests=64, inflight_bytes=1 << 19)


async def test_a_connection_that_leaves_is_told_no_more_of_its_share() -> None:
    """Its GOODBYE waits for an answer when the share changes: a CREDIT would break the state table."""
    async with house(inflight_bytes=32 * MIB) as home:
        hello = Hello(features=Feature.CREDITS)
        first = await home.connect(hello)
        await first.write({key_of(1): content(MIB)})
        await first.ask(read(key_of(1), capacity=MIB))  # and takes none of it yet
        await first.ask(Goodbye())
        await until(lambda: home.sessions[0]._connection.state is not State.OPEN)
        other = await home.connect(hello)
        await other.call(Ping())
        assert [type(notice) for notice in await first.closed()] == [Credit]


@pytest.mark.timeout(40)
async def test_a_peer_that_takes_no_answers_is_asked_for_no_more_requests() -> None:
    """Its answers wait in memory: so many, and then it is not read from until it has taken some."""
    limits = Limits(max_requests=1024)
    async with house(limits=limits) as home:
        peer = await home.connect(Hello(max_body_bytes=64), buffer_bytes=4 * KIB)
        keys = tuple(map(key_of, range(4096)))
        asked: list[int] = []

        async def ask() -> None:
            while len(asked) < 400:
                asked.append(await peer.ask(Exist(namespace=NAMESPACE, keys=keys)))

        outbox = home.sessions[0]._outbox
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: outbox._reply_bytes > MAX_REPLY_BYTES)
            await anyio.wait_all_tasks_blocked()
            answer_bytes = 4096 // 32 * (96 + FRAME_OVERHEAD_BYTES)
            assert outbox._reply_bytes <= MAX_REPLY_BYTES + answer_bytes
            assert len(asked) < 400
            for number in range(400):
                await until(lambda number=number: len(asked) > number)
                assert (await peer.answer(asked[number])).statuses == [NOT_FOUND] * 4096
        assert outbox._reply_bytes == 0
