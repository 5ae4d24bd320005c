"""What the verbs do when nothing goes wrong, at every size."""

import array

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_client import Client, ClientConfig, ErrorCode, ObjectKey
from adp_client.epoch import MAX_PASSED_OVER
from adp_client.errors import LocalProtocolError, Overloaded, Refused
from adp_client.operations import Operation
from adp_client.protocol.messages import (
    Check,
    Exist,
    ExistReply,
    Limits,
    Read,
    ReadItem,
    ReadReply,
    StatusReply,
    Write,
)
from adp_client.testing import MemoryGateway
from client.support import NAMESPACE, connected, leftovers, pattern

pytestmark = pytest.mark.anyio
OTHER = bytes(32)


def keys_of(count: int, width: int = 8) -> list[bytes]:
    return [at.to_bytes(width, "big") for at in range(count)]


async def test_write_exist_read_delete():
    keys = keys_of(3)
    async with connected() as (client, gateway):
        written = await client.write(NAMESPACE, keys, [pattern(at, 1000 + at) for at in range(3)])
        assert written.is_all_ok
        found = await client.exist(NAMESPACE, [*keys[:2], b"nowhere!", keys[2]])
        assert found.statuses == bytes([0, 0, ErrorCode.NOT_FOUND, 0])
        assert (found.leading_ok, found.count_ok, found.is_all_ok) == (2, 3, False)
        buffers = [bytearray(1100) for _ in keys]
        read = await client.read(NAMESPACE, keys, buffers)
        assert read.lengths == (1000, 1001, 1002)
        assert [bytes(b[:n]) for b, n in zip(buffers, read.lengths, strict=True)] == [
            pattern(at, 1000 + at) for at in range(3)
        ]
        assert all(not any(b[n:]) for b, n in zip(buffers, read.lengths, strict=True))
        deleted = await client.delete(NAMESPACE, [keys[0], b"nowhere!"])
        assert deleted.statuses == bytes([0, ErrorCode.NOT_FOUND])
        assert (await client.exist(NAMESPACE, keys)).statuses == bytes([1, 0, 0])
        assert (await client.check(NAMESPACE, keys)).statuses == bytes([1, 0, 0])
        await client.fence()
        assert await client.ping() >= 0
        assert gateway.violations == []


async def test_namespaces_are_worlds_apart():
    async with connected() as (client, _):
        await client.write(NAMESPACE, [b"key"], [b"here"])
        assert (await client.exist(OTHER, [b"key"])).count_ok == 0


async def test_an_empty_batch_needs_no_gateway():
    async with Client(ClientConfig(endpoint="unix:///nobody/is/here")) as client:
        assert (await client.exist(NAMESPACE, [])).statuses == b""
        assert (await client.read(NAMESPACE, [], [])).lengths == ()
        assert (await client.write(NAMESPACE, [], [])).is_all_ok


async def test_ten_thousand_keys_in_one_exist_are_one_frame():
    keys = keys_of(10_000, width=40)
    async with connected() as (client, gateway):
        for key in keys[:5000]:
            gateway.put(NAMESPACE, key, b"")
        found = await client.exist(NAMESPACE, keys)
        assert (found.leading_ok, found.count_ok) == (5000, 5000)
        assert len(gateway.sessions[0].requests) == 1


async def test_batches_are_cut_by_items_and_by_the_body_and_put_together_again():
    limits = Limits(max_items=100, max_body_bytes=48 + 30 * 8)
    keys = keys_of(250)
    async with connected(MemoryGateway(limits=limits)) as (client, gateway):
        for key in keys[::3]:
            gateway.put(NAMESPACE, key, key)
        found = await client.exist(NAMESPACE, keys)
        assert found.statuses == bytes(at % 3 > 0 for at in range(250))
        sizes = [len(r.message.keys) for r in gateway.sessions[0].requests if isinstance(r.message, Exist)]
        assert sum(sizes) == 250
        assert max(sizes) == 30
        assert gateway.violations == []


async def test_keys_of_different_widths_are_asked_in_groups():
    keys = [b"a", b"bb", b"c", b"ddd", b"ee"]
    async with connected() as (client, gateway):
        await client.write(NAMESPACE, keys, keys)
        buffers = [bytearray(3) for _ in keys]
        read = await client.read(NAMESPACE, keys, buffers)
        assert [bytes(b[:n]) for b, n in zip(buffers, read.lengths, strict=True)] == keys
        assert (await client.exist(NAMESPACE, [b"a", b"zz", b"ddd"])).statuses == bytes([0, 1, 0])
        assert gateway.violations == []


async def test_a_thousand_pages_into_scattered_buffers():
    page = 4096
    keys = keys_of(1000)
    memory = bytearray(1000 * 2 * page)
    slots = [memoryview(memory)[2 * at * page : (2 * at + 1) * page] for at in reversed(range(1000))]
    async with connected(MemoryGateway(frame_bytes=300_000)) as (client, gateway):
        for at, key in enumerate(keys):
            gateway.put(NAMESPACE, key, pattern(at, page))
        read = await client.read(NAMESPACE, keys, slots)
        assert read.is_all_ok
        assert all(bytes(slots[at]) == pattern(at, page) for at in range(0, 1000, 7))
        gaps = memoryview(memory).cast("B")
        assert not any(any(gaps[(2 * at + 1) * page : (2 * at + 2) * page]) for at in range(0, 1000, 13))


async def test_w2_a_thousand_pages_that_come_out_of_order_and_in_parts_are_one_wait(monkeypatch):
    """Frames of a few pages' halves each, the last page first; the caller sleeps once."""
    page = 1000
    keys = keys_of(1000)
    memory = bytearray(1000 * 2 * page)
    slots = [memoryview(memory)[2 * at * page : (2 * at + 1) * page] for at in range(1000)]
    order = [at * 7 % 1000 for at in range(1000)]  # 7 and 1000 have no divisor in common: each page once

    async def script(session, request) -> bool:
        if not isinstance(request.message, Read):
            return False
        parts = [(at, 0) for at in order] + [(at, page // 2) for at in reversed(order)]
        for start in range(0, len(parts), 30):
            rows, payload = [], []
            for index, offset in parts[start : start + 30]:
                stored = gateway.objects[NAMESPACE, request.message.keys[index]]
                rows.append(
                    ReadItem(
                        index=index,
                        object_bytes=page,
                        offset=offset,
                        length=page // 2,
                        checksum=stored.checksum,
                    )
                )
                payload.append(memoryview(stored.data)[offset : offset + page // 2])
            is_final = start + 30 >= len(parts)
            await session.send_reply(
                request.request_id, ReadReply(items=tuple(rows)), payload, is_final=is_final
            )
        return True

    waits: list[object] = []
    changed = Operation.changed

    async def counted(operation) -> None:
        waits.append(operation)
        await changed(operation)

    monkeypatch.setattr(Operation, "changed", counted)
    async with connected() as (client, gateway):
        for at, key in enumerate(keys):
            gateway.put(NAMESPACE, key, pattern(at, page))
        gateway.script = script
        read = await client.read(NAMESPACE, keys, slots)
        assert read.is_all_ok
        assert all(bytes(slots[at]) == pattern(at, page) for at in range(0, 1000, 7))
        assert not any(any(memory[(2 * at + 1) * page : (2 * at + 2) * page]) for at in range(1000))
        assert len(waits) == 1
        assert len(gateway.sessions[0].requests) == 1


async def test_requests_stay_inside_the_window():
    """Credits: the gateway's core would end the connection at the first byte too many."""
    limits = Limits(
        max_requests=3, max_inflight_bytes=40_000, max_payload_bytes=9000, max_object_bytes=20_000
    )
    keys = keys_of(40)
    async with connected(MemoryGateway(limits=limits, frame_bytes=4000)) as (client, gateway):
        assert (await client.write(NAMESPACE, keys, [pattern(at, 5000) for at in range(40)])).is_all_ok
        buffers = [bytearray(20_000) for _ in keys]
        assert (await client.read(NAMESPACE, keys, buffers)).is_all_ok
        assert all(bytes(b[:5000]) == pattern(at, 5000) for at, b in enumerate(buffers))
        assert gateway.violations == []
        assert len(gateway.sessions) == 1


async def test_credit_narrows_the_window_and_widens_it_again():
    """How much was ever in flight. What is larger than the credit goes alone."""
    limits = Limits(max_requests=64, max_inflight_bytes=400_000, max_object_bytes=100_000)
    seen: list[tuple[int, int]] = []

    async def watch(session, request) -> bool:
        await wait_all_tasks_blocked()  # let the client send whatever it may
        window = client._link._epoch._connection._window
        seen.append((window.requests, window.inflight_bytes))
        return False

    async def read_all(client) -> None:
        async with anyio.create_task_group() as tasks:
            for at in range(12):
                size = 30_000 if at % 4 else 100_000
                tasks.start_soon(client.read, NAMESPACE, [b"%d" % at], [bytearray(size)])

    async with connected(MemoryGateway(limits=limits)) as (client, gateway):
        await client.wait_connected()
        await gateway.sessions[0].send_credit(requests=2, inflight_bytes=70_000)
        gateway.script = watch
        await client.ping()
        await read_all(client)
        assert max(requests for requests, _ in seen) == 2
        assert all(inflight <= 70_000 or requests == 1 for requests, inflight in seen)
        await gateway.sessions[0].send_credit(requests=64, inflight_bytes=400_000)
        await client.ping()
        seen.clear()
        await read_all(client)
        assert max(requests for requests, _ in seen) > 4
        assert gateway.violations == []


async def test_zero_length_objects():
    async with connected() as (client, gateway):
        assert (await client.write(NAMESPACE, [b"0", b"1", b"2"], [b"", b"x", b""])).is_all_ok
        buffers = [bytearray(b"--"), bytearray(b"--"), bytearray()]
        read = await client.read(NAMESPACE, [b"0", b"1", b"2"], buffers)
        assert (read.statuses, read.lengths, bytes(buffers[1])) == (bytes(3), (0, 1, 0), b"x-")
        assert (await client.read(NAMESPACE, [b"0"], [bytearray()])).is_all_ok
        assert gateway.violations == []


async def test_objects_above_a_frame_span_frames_both_ways():
    limits = Limits(max_payload_bytes=10_000)
    big, small = pattern(1, 35_001), pattern(2, 10)
    async with connected(MemoryGateway(limits=limits, frame_bytes=7000)) as (client, gateway):
        keys = [b"s", b"b", b"t"]
        written = await client.write(NAMESPACE, keys, [small, [big[:5], big[5:]], small])
        assert written.is_all_ok
        frames = [r for r in gateway.sessions[0].requests if isinstance(r.message, Write)]
        assert [r.is_final for r in frames].count(False) == 3
        buffers = [bytearray(40_000) for _ in range(3)]
        read = await client.read(NAMESPACE, keys, buffers)
        assert read.lengths == (10, 35_001, 10)
        assert bytes(buffers[1][:35_001]) == big
        assert gateway.violations == []


async def test_too_large_for_the_gateway_or_for_the_buffer_is_a_status():
    limits = Limits(max_object_bytes=1000, max_payload_bytes=5000)
    async with connected(MemoryGateway(limits=limits)) as (client, gateway):
        written = await client.write(NAMESPACE, [b"0", b"1", b"2"], [b"x" * 1000, b"x" * 1001, b"ok"])
        assert written.statuses == bytes([0, ErrorCode.TOO_LARGE, 0])
        read = await client.read(NAMESPACE, [b"0", b"2"], [bytearray(999), bytearray(2)])
        assert read.statuses == bytes([ErrorCode.TOO_LARGE, 0])
        assert read.lengths == (0, 2)
        assert (await client.write(NAMESPACE, [b"1"], [b"x" * 1001])).statuses == bytes([ErrorCode.TOO_LARGE])
        assert gateway.violations == []


async def test_payloads_may_be_any_buffers_and_lists_of_them():
    numbers = array.array("I", range(100))
    async with connected() as (client, _):
        await client.write(NAMESPACE, [b"0", b"1"], [numbers, [b"ab", b"", memoryview(b"cde")[1:]]])
        target = array.array("I", [0] * 100)
        text = bytearray(10)
        read = await client.read(NAMESPACE, [b"0", b"1"], [target, text])
        assert target == numbers
        assert bytes(text[: read.lengths[1]]) == b"abde"


def released() -> memoryview:
    view = memoryview(bytearray(8))
    view.release()
    return view


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.exist(b"short", [b"k"]), "namespace"),
        (lambda c: c.exist(NAMESPACE, [b""]), "a key is"),
        (lambda c: c.exist(NAMESPACE, [b"k" * 129]), "a key is"),
        (lambda c: c.read(NAMESPACE, [b"k"], []), "1 keys and 0 buffers"),
        (lambda c: c.read(NAMESPACE, [b"k"], [b"readonly"]), "writable"),
        (lambda c: c.read(NAMESPACE, [b"k"], [memoryview(bytearray(8))[::2]]), "contiguous"),
        (lambda c: c.write(NAMESPACE, [b"k"], [memoryview(bytes(8))[::2]]), "contiguous"),
        (lambda c: c.write(NAMESPACE, [b"k", b"l"], [b""]), "2 keys and 1 buffers"),
        (lambda c: c.exist(bytearray(32), [b"k"]), "a namespace is bytes, not bytearray"),
        (lambda c: c.delete("n" * 32, [b"k"]), "a namespace is bytes, not str"),
        (lambda c: c.check(None, [b"k"]), "a namespace is bytes, not NoneType"),
        (lambda c: c.exist(NAMESPACE, [ObjectKey(block_hash=b"h", group=0)]), r"\.to_bytes\(\)"),
        (lambda c: c.exist(NAMESPACE, ["text"]), "a key is bytes, not str: 'text'"),
        (lambda c: c.exist(NAMESPACE, [None]), "a key is bytes, not NoneType"),
        (lambda c: c.exist(NAMESPACE, b"one key"), "keys are given as a list of bytes, not as bytes"),
        (lambda c: c.delete(NAMESPACE, "one key"), "keys are given as a list of bytes, not as str"),
        (lambda c: c.check(NAMESPACE, 7), "keys are given as a list of bytes, not as int"),
        (lambda c: c.read(NAMESPACE, [b"k"], bytearray(1)), "a list of buffers, not as bytearray"),
        (lambda c: c.read(NAMESPACE, [b"k"], 7), "a list of buffers, not as int"),
        (lambda c: c.read(NAMESPACE, [b"k"], [7]), "cannot read into int"),
        (lambda c: c.read(NAMESPACE, [b"k"], [None]), "cannot read into NoneType"),
        (lambda c: c.read(NAMESPACE, [b"k"], [released()]), "cannot read into memoryview"),
        (lambda c: c.write(NAMESPACE, [b"k"], b"v"), "a list of buffers, not as bytes"),
        (lambda c: c.write(NAMESPACE, [b"k"], ["text"]), "cannot write from str"),
        (lambda c: c.write(NAMESPACE, [b"k"], [[b"v", 7]]), "cannot write from int"),
    ],
)
async def test_wrong_use_is_a_local_error_and_harms_nothing(call, words):
    async with connected() as (client, gateway):
        with pytest.raises(LocalProtocolError, match=words):
            await call(client)
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
        assert len(gateway.sessions) == 1


@pytest.mark.parametrize(
    ("spans", "is_fine"),
    [
        ([(0, 8), (8, 16), (16, 16), (4, 4)], True),
        ([(8, 16), (0, 8)], True),
        ([(0, 8), (7, 16)], False),
        ([(8, 16), (0, 16)], False),
        ([(0, 8), (0, 8)], False),
        ([(0, 2), (4, 6), (8, 10), (5, 6)], False),
    ],
)
async def test_buffers_of_one_read_must_not_overlap(spans, is_fine):
    """Two objects would land in the same bytes, each be found whole, and one of them be lost."""
    memory = bytearray(b"-" * 16)
    buffers = [memoryview(memory)[begin:end] for begin, end in spans]
    keys = keys_of(len(spans))
    async with connected() as (client, gateway):
        for key, buffer in zip(keys, buffers, strict=True):
            gateway.put(NAMESPACE, key, b"x" * len(buffer))
        if is_fine:
            assert (await client.read(NAMESPACE, keys, buffers)).is_all_ok
            return
        with pytest.raises(LocalProtocolError, match="overlap"):
            await client.read(NAMESPACE, keys, buffers)
        assert memory == b"-" * 16
        # In two calls, and to write from, it is the caller's own business.
        assert (await client.write(NAMESPACE, keys, buffers)).is_all_ok
        assert len(gateway.sessions) == 1


async def test_a_key_wider_than_this_gateway_takes_is_a_local_error():
    async with connected(MemoryGateway(limits=Limits(max_key_bytes=16))) as (client, _):
        with pytest.raises(LocalProtocolError, match="takes 16"):
            await client.exist(NAMESPACE, [b"k" * 17])
        with pytest.raises(LocalProtocolError, match="takes 16"):
            await client.write(NAMESPACE, [b"k" * 17], [b""])


async def test_a_corrupt_object_is_a_status_a_counter_and_a_check_never_bytes():
    async with connected() as (client, gateway):
        gateway.put(NAMESPACE, b"good", b"fine")
        gateway.put(NAMESPACE, b"evil", b"rot!", checksum=7)
        gateway.put(NAMESPACE, b"huge", bytes(3_000_000), checksum=7)
        buffers = [bytearray(4), bytearray(4), bytearray(3_000_000)]
        checked: list[tuple[bytes, ...]] = []

        async def script(session, request) -> bool:
            if isinstance(request.message, Check):
                checked.append(request.message.keys)
            return False

        gateway.script = script
        read = await client.read(NAMESPACE, [b"good", b"evil", b"huge"], buffers)
        assert read.statuses == bytes([0, ErrorCode.CORRUPT, ErrorCode.CORRUPT])
        assert read.lengths == (4, 0, 0)
        assert client.stats().objects_corrupt == 2
        while len(gateway.objects) > 1 or leftovers(client):
            await client.ping()  # the report goes out in the background; the gateway drops both
        assert (NAMESPACE, b"good") in gateway.objects
        assert client.stats().checks_dropped == 0
        assert checked == [(b"evil", b"huge")], "one vector, not a request for each"


async def test_without_verification_the_caller_gets_what_there_is():
    async with connected(MemoryGateway(verifies=False), verify_payloads=False) as (client, gateway):
        gateway.put(NAMESPACE, b"evil", b"rot!", checksum=7)
        assert (await client.read(NAMESPACE, [b"evil"], [bytearray(4)])).is_all_ok
        assert client.stats().objects_corrupt == 0


async def test_a_refused_request_raises_its_own_error_and_the_link_stays():
    async def script(session, request):
        if isinstance(request.message, Exist):
            reply = StatusReply(status=ErrorCode.OVERLOADED, retry_after_ms=1500)
            return await refuse(session, request, reply)
        if isinstance(request.message, Write):
            return await refuse(session, request, StatusReply(status=ErrorCode.REFUSED))
        return False

    async with connected() as (client, gateway):
        gateway.script = script
        with pytest.raises(Overloaded) as caught:
            await client.exist(NAMESPACE, [b"k"])
        assert caught.value.retry_after == 1.5
        with pytest.raises(Refused):
            await client.write(NAMESPACE, [b"k"], [b"v"])
        assert (await client.read(NAMESPACE, [b"k"], [bytearray(1)])).statuses == b"\1"
        assert len(gateway.sessions) == 1


async def test_b34_one_refused_part_of_a_batch_is_statuses_of_its_items():
    async def script(session, request):
        if isinstance(request.message, Read) and b"\0" * 8 in request.message.keys:
            return await refuse(session, request, StatusReply(status=ErrorCode.GATEWAY_FAULT))
        return False

    async with connected(MemoryGateway(limits=Limits(max_items=2))) as (client, gateway):
        keys = keys_of(4)
        await client.write(NAMESPACE, keys, keys)
        gateway.script = script
        read = await client.read(NAMESPACE, keys, [bytearray(8) for _ in keys])
        assert read.statuses == bytes([ErrorCode.GATEWAY_FAULT, ErrorCode.GATEWAY_FAULT, 0, 0])


async def refuse(session, request, reply):
    kind = {Exist: ExistReply, Read: ReadReply}.get(type(request.message), StatusReply)
    await session.send_reply(
        request.request_id, kind(status=reply.status, retry_after_ms=reply.retry_after_ms)
    )
    return True


class Held:
    """A script that notes the verbs in order and answers nothing before `go`."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = anyio.Event()

    async def __call__(self, session, request) -> bool:
        self.order.append(type(request.message).__name__)
        await self.go.wait()
        return False


async def test_b46_reads_and_lookups_go_before_queued_writes():
    """W11: a queue of writes does not hold up a read."""
    held = Held()
    gateway = MemoryGateway(limits=Limits(max_requests=1, max_payload_bytes=1000))
    async with connected(gateway) as (client, _):
        gateway.script = held
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, keys_of(5), [bytes(900)] * 5)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.exist, NAMESPACE, [b"k"])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.read, NAMESPACE, [b"k"], [bytearray(1)])
            await anyio.wait_all_tasks_blocked()
            held.go.set()
        assert held.order == ["Write", "Exist", "Read", "Write", "Write", "Write", "Write"]


@pytest.mark.parametrize("verb", ["write", "delete"])
async def test_busy_reads_do_not_starve_what_comes_after_them(verb):
    """Each read wants more than half of the window: whenever one ends, the next one is there already."""
    order: list[str] = []

    async def script(session, request) -> bool:
        order.append(type(request.message).__name__)
        return False

    limits = Limits(max_inflight_bytes=1000, max_object_bytes=1000, max_payload_bytes=1000)
    async with connected(MemoryGateway(limits=limits)) as (client, gateway):
        gateway.put(NAMESPACE, b"k", bytes(600))
        gateway.script = script

        async def read() -> None:
            while len(order) < 200:  # a starved verb fails this test and does not hang it
                await client.read(NAMESPACE, [b"k"], [bytearray(600)])

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(read)
            while len(order) < 20:
                await anyio.lowlevel.checkpoint()
            begun = len(order)
            arguments = ([b"w"], [bytes(600)]) if verb == "write" else ([b"w"],)
            await getattr(client, verb)(NAMESPACE, *arguments)
            tasks.cancel_scope.cancel()
        between = order[begun : order.index(verb.capitalize())]
        assert len(between) <= MAX_PASSED_OVER + 2, "the gateway may see the ones that were on their way"


async def test_a_fence_does_not_overtake_what_was_asked_before_it():
    held = Held()
    async with connected(MemoryGateway(limits=Limits(max_requests=1))) as (client, gateway):
        gateway.script = held
        async with anyio.create_task_group() as tasks:
            for _ in range(2 * MAX_PASSED_OVER):
                tasks.start_soon(client.exist, NAMESPACE, [b"k"])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            held.go.set()
        assert held.order == ["Exist"] * 2 * MAX_PASSED_OVER + ["Fence"]


async def test_a_fence_keeps_its_place_among_writes_and_reads_stay_behind_it():
    held = Held()
    gateway = MemoryGateway(limits=Limits(max_requests=1, max_payload_bytes=1000))
    async with connected(gateway) as (client, _):
        gateway.script = held
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, keys_of(3), [bytes(900)] * 3)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.exist, NAMESPACE, [b"k"])
            await anyio.wait_all_tasks_blocked()
            held.go.set()
        assert held.order == ["Write", "Write", "Write", "Fence", "Exist"]


async def test_stats_are_a_copy():
    async with connected() as (client, _):
        before = client.stats()
        await client.write(NAMESPACE, [b"k"], [b"12345"])
        await client.read(NAMESPACE, [b"k"], [bytearray(9)])
        after = client.stats()
    assert (before.requests, after.requests, after.replies) == (0, 2, 2)
    assert (after.bytes_written, after.bytes_read) == (5, 5)
    assert (after.connects, after.boots_seen, after.connections_lost) == (1, 1, 0)
