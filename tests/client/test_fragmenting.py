"""W1 against a gateway that does not cut: every verb, every size, whole or absent."""

import itertools
import struct

import anyio
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from adp_client import ErrorCode
from adp_client.fragments import MANIFEST_BYTES, MAX_FRAGMENTS, Manifest
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Limits,
    Read,
    ReadReply,
    StatusReply,
    Write,
)
from adp_client.testing import MemoryGateway
from client.fragmented import (
    KEY,
    LOOKALIKE,
    L,
    Turns,
    client_of,
    get,
    in_turns,
    manifest_of,
    names_of,
    uncutting,
)
from client.support import NAMESPACE, connected, leftovers, pattern

pytestmark = pytest.mark.anyio

NOT_FOUND, CORRUPT, TOO_LARGE = ErrorCode.NOT_FOUND, ErrorCode.CORRUPT, ErrorCode.TOO_LARGE


def sizes(command_bytes: int) -> list[int]:
    around = [0, 1, command_bytes - 1, command_bytes, command_bytes + 1]
    return [*around, command_bytes * 27 // 8, 64 * command_bytes]  # 27/8 of 256 KiB is 864 KiB


@pytest.mark.parametrize("cuts_itself", [True, False], ids=["gateway cuts", "client cuts"])
@pytest.mark.parametrize("command_bytes", [MANIFEST_BYTES, L, 256 << 10])
async def test_every_size_through_every_verb(cuts_itself, command_bytes):
    keys = [b"%03d" % at for at in range(7)]
    objects = [pattern(at, size % 5000) * (size // 5000 + 1) for at, size in enumerate(sizes(command_bytes))]
    objects = [each[:size] for each, size in zip(objects, sizes(command_bytes), strict=True)]
    gateway = MemoryGateway(fragments=cuts_itself, limits=Limits(max_command_bytes=command_bytes))
    async with connected(gateway) as (client, _):
        assert (Feature.FRAGMENTS in client.gateway.features) == cuts_itself
        assert (await client.write(NAMESPACE, keys, objects)).is_all_ok
        if not cuts_itself:
            assert max(len(stored.data) for stored in gateway.objects.values()) <= command_bytes
        assert (await client.exist(NAMESPACE, [*keys, b"no!"])).statuses == bytes(7) + b"\1"
        assert (await client.check(NAMESPACE, [*keys, b"no!"])).statuses == bytes(7) + b"\1"
        memory = [bytearray(len(each) + 3) for each in [*objects, b"12"]]
        read = await client.read(NAMESPACE, [*keys, b"no!"], memory)
        assert read.statuses == bytes(7) + b"\1"
        assert read.lengths == (*map(len, objects), 0)
        assert [bytes(got[: len(each)]) for got, each in zip(memory, objects, strict=False)] == objects
        assert all(got[len(each) :] == bytes(3) for got, each in zip(memory, objects, strict=False))
        exact = [bytearray(len(each)) for each in objects]
        assert (await client.read(NAMESPACE, keys, exact)).is_all_ok
        assert exact == objects
        assert (await client.delete(NAMESPACE, [*keys, b"no!"])).statuses == bytes(7) + b"\1"
        assert gateway.objects == {}
        assert gateway.violations == []
        assert leftovers(client) == []


async def test_an_object_that_looks_like_a_manifest_comes_back_as_it_was():
    """At every gateway; also the bytes of a real manifest, copied by somebody."""
    for cuts_itself in (True, False):
        async with connected(MemoryGateway(fragments=cuts_itself)) as (client, gateway):
            copied = Manifest(object_bytes=100, fragment_bytes=50, digest=5).encode()
            for alike in (LOOKALIKE, copied):
                assert (await client.write(NAMESPACE, [KEY], [[alike[:10], alike[10:]]])).is_all_ok
                assert manifest_of(gateway).count == 1
                assert await get(client) == alike
                assert await get(client, room=64) == alike
            near = LOOKALIKE[:1] + b"!" + LOOKALIKE[2:]
            await client.write(NAMESPACE, [KEY], [near])
            assert gateway.objects[NAMESPACE, KEY].data == near
            assert await get(client) == near


async def test_bytes_that_only_begin_like_a_manifest_are_bytes():
    """Stored by somebody who knows no manifests."""
    for cuts_itself in (True, False):
        async with connected(MemoryGateway(fragments=cuts_itself)) as (client, gateway):
            gateway.put(NAMESPACE, KEY, LOOKALIKE)
            assert await get(client) == LOOKALIKE


async def test_a_store_keeps_its_meaning_when_its_gateway_begins_to_cut_or_ceases():
    big, small = pattern(1, 3 * L), pattern(2, L)
    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, [KEY, b"s"], [big, small])
        gateway.features |= Feature.FRAGMENTS
        gateway.restart(b"2" * 16)
        await client.fence()
        assert await get(client) == big
        assert await get(client, b"s") == small
        await client.write(NAMESPACE, [b"b"], [big])
        assert gateway.objects[NAMESPACE, b"b"].data == big
        gateway.features &= ~Feature.FRAGMENTS
        gateway.restart(b"3" * 16)
        await client.fence()
        assert await get(client, b"b") == big
        assert await get(client) == big


async def test_too_large_for_the_buffer_is_a_status_at_every_size_of_buffer():
    async with connected(uncutting()) as (client, _):
        await client.write(NAMESPACE, [KEY], [pattern(1, 3 * L)])
        for room in (0, 1, 63, 64, 65, L, 3 * L - 1):
            read = await client.read(NAMESPACE, [KEY], [bytearray(room)])
            assert (read.statuses, read.lengths) == (bytes([TOO_LARGE]), (0,))
        assert (await client.read(NAMESPACE, [KEY], [bytearray(3 * L)])).is_all_ok


@pytest.mark.parametrize(
    ("gateway", "size"),
    [
        (uncutting(64), 64 * MAX_FRAGMENTS + 1),
        (uncutting(63), 64),
        (uncutting(limits={"max_key_bytes": 31}), L + 1),
    ],
    ids=["too many fragments", "a manifest does not fit", "short keys"],
)
async def test_what_cannot_be_cut_is_too_large_and_harms_nobody(gateway, size):
    async with connected(gateway) as (client, _):
        written = await client.write(NAMESPACE, [b"0", KEY, b"2"], [b"", bytes(size), b""])
        assert written.statuses == bytes([0, TOO_LARGE, 0])
        assert (await client.exist(NAMESPACE, [b"0", KEY, b"2"])).statuses == bytes([0, NOT_FOUND, 0])


async def test_a_manifest_at_a_gateway_whose_keys_are_too_short_for_fragments_is_a_miss():
    async with connected(uncutting(limits={"max_key_bytes": 31})) as (client, gateway):
        gateway.put(NAMESPACE, KEY, Manifest(object_bytes=L + 1, fragment_bytes=L, digest=1).encode())
        assert await get(client) == NOT_FOUND
        assert (await client.check(NAMESPACE, [KEY])).statuses == bytes([NOT_FOUND])
        assert (await client.delete(NAMESPACE, [KEY])).is_all_ok


async def test_a_manifest_that_nobody_could_have_written_is_corrupt():
    raw = bytearray(Manifest(object_bytes=L + 1, fragment_bytes=L, digest=1).encode())
    raw[28] = 1  # reserved
    raw[56:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(raw[:56]))
    for cuts_itself in (True, False):
        async with connected(MemoryGateway(fragments=cuts_itself)) as (client, gateway):
            gateway.put(NAMESPACE, KEY, bytes(raw))
            read = await client.read(NAMESPACE, [KEY], [bytearray(200)])
            assert (read.statuses, read.lengths) == (bytes([CORRUPT]), (0,))
            if not cuts_itself:
                assert (await client.exist(NAMESPACE, [KEY])).statuses == bytes([NOT_FOUND])
                assert (await client.check(NAMESPACE, [KEY])).statuses == bytes([CORRUPT])


# ------------------------------------------------------------ fragments that are lost or damaged


@pytest.mark.parametrize("lost", range(5))
async def test_without_any_one_fragment_the_object_is_absent(lost):
    """Eviction knows nothing of manifests. The neighbours in the vector are untouched."""
    keys = [b"before", KEY, b"after"]
    objects = [pattern(1, 2 * L), pattern(2, 5 * L - 7), pattern(3, 9)]
    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, keys, objects)
        del gateway.objects[NAMESPACE, names_of(gateway)[lost]]
        assert (await client.exist(NAMESPACE, keys)).statuses == bytes([0, NOT_FOUND, 0])
        assert (await client.check(NAMESPACE, keys)).statuses == bytes([0, NOT_FOUND, 0])
        memory = [bytearray(5 * L) for _ in keys]
        read = await client.read(NAMESPACE, keys, memory)
        assert read.statuses == bytes([0, NOT_FOUND, 0])
        assert read.lengths == (2 * L, 0, 9)
        assert bytes(memory[0][: 2 * L]) == objects[0]
        assert bytes(memory[2][:9]) == objects[2]
        assert (await client.write(NAMESPACE, [KEY], [objects[1]])).is_all_ok
        assert await get(client) == objects[1]
        del gateway.objects[NAMESPACE, names_of(gateway)[lost]]
        assert (await client.delete(NAMESPACE, keys)).is_all_ok
        assert gateway.objects == {}


@pytest.mark.parametrize("damaged", range(3))
async def test_a_damaged_fragment_is_corrupt_then_dropped_never_bytes(damaged):
    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, [KEY, b"fine"], [pattern(2, 3 * L), pattern(3, 3 * L)])
        name = names_of(gateway)[damaged]
        stored = gateway.objects[NAMESPACE, name]
        gateway.put(NAMESPACE, name, stored.data[:-1] + b"?", checksum=stored.checksum)
        read = await client.read(NAMESPACE, [KEY, b"fine"], [bytearray(3 * L), bytearray(3 * L)])
        assert (read.statuses, read.lengths) == (bytes([CORRUPT, 0]), (0, 3 * L))
        assert client.stats().objects_corrupt == 1
        while (NAMESPACE, name) in gateway.objects or leftovers(client):
            await client.ping()  # reported in the background, and dropped
        assert await get(client) == NOT_FOUND
        assert await get(client, b"fine") == pattern(3, 3 * L)


@pytest.mark.parametrize("damaged", range(3))
async def test_check_finds_a_damaged_fragment_and_the_object_is_absent(damaged):
    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, [KEY, b"fine"], [pattern(2, 3 * L), pattern(3, 3 * L)])
        gateway.put(NAMESPACE, names_of(gateway)[damaged], bytes(L), checksum=1)
        checked = await client.check(NAMESPACE, [b"fine", KEY, b"gone"])
        assert checked.statuses == bytes([0, CORRUPT, NOT_FOUND])
        assert await get(client) == NOT_FOUND


@pytest.mark.parametrize("other", [b"", pattern(9, L), pattern(9, L - 1), pattern(9, L + 1)])
@pytest.mark.parametrize("place", range(3))
async def test_a_fragment_with_other_contents_and_a_right_checksum_is_corrupt(place, other):
    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, [KEY], [pattern(2, 3 * L)])
        gateway.put(NAMESPACE, names_of(gateway)[place], other)
        read = await client.read(NAMESPACE, [KEY], [bytearray(3 * L)])
        assert (read.statuses, read.lengths) == (bytes([CORRUPT]), (0,))


async def test_swapped_fragments_are_corrupt():
    async with connected(uncutting(), verify_payloads=False) as (client, gateway):
        await client.write(NAMESPACE, [KEY], [pattern(2, 3 * L)])
        one, two = ((NAMESPACE, name) for name in names_of(gateway)[:2])
        gateway.objects[one], gateway.objects[two] = gateway.objects[two], gateway.objects[one]
        assert (await client.read(NAMESPACE, [KEY], [bytearray(3 * L)])).statuses == bytes([CORRUPT])


async def test_a_damaged_plain_object_is_not_there_for_exist():
    async with connected(uncutting()) as (client, gateway):
        gateway.put(NAMESPACE, KEY, b"rot!", checksum=7)
        assert (await client.exist(NAMESPACE, [KEY])).statuses == bytes([NOT_FOUND])
        while gateway.objects or leftovers(client):
            await client.ping()


# ------------------------------------------------------------ refusals


async def refuse(session, request, code):
    kind = {Exist: ExistReply, Read: ReadReply}.get(type(request.message), StatusReply)
    await session.send_reply(request.request_id, kind(status=code))
    return True


@pytest.mark.parametrize("verb", ["write", "read", "exist", "check"])
async def test_a_refused_later_step_is_the_status_of_its_items(verb):
    async def script(session, request) -> bool:
        keys = getattr(request.message, "keys", (b"",))
        is_later = keys == (KEY,) if verb == "write" else len(keys[0]) == 32
        return is_later and await refuse(session, request, ErrorCode.OVERLOADED)

    async with connected(uncutting()) as (client, gateway):
        big, small = pattern(1, 3 * L), pattern(2, 9)
        await client.write(NAMESPACE, [KEY, b"s"], [big, small])
        gateway.script = script
        more = {"write": [[big, small]], "read": [[bytearray(3 * L), bytearray(9)]]}.get(verb, [])
        result = await getattr(client, verb)(NAMESPACE, [KEY, b"s"], *more)
        assert result.statuses == bytes([ErrorCode.OVERLOADED, 0])


async def test_a_fragment_that_finds_no_room_keeps_the_object_from_being_seen():
    async def script(session, request) -> bool:
        if isinstance(request.message, Write) and len(request.message.keys) == 3:
            session._store(request.request_id, request.message.namespace)
            statuses = bytes([0, ErrorCode.CAPACITY_EXHAUSTED, 0])
            await session.send_reply(request.request_id, StatusReply(statuses=statuses))
            return True
        return False

    async with connected(uncutting()) as (client, gateway):
        await client.write(NAMESPACE, [KEY], [b"old"])
        gateway.script = script
        written = await client.write(NAMESPACE, [KEY], [pattern(1, 3 * L)])
        assert written.statuses == bytes([ErrorCode.CAPACITY_EXHAUSTED])
        assert await get(client) == b"old"


# ------------------------------------------------------------ large vectors


async def test_many_large_objects_are_few_requests():
    """W2: two steps for a vector, not two for an object."""
    keys = [b"%04d" % at for at in range(500)]
    objects = [pattern(at, 3 * L + 40) for at in range(500)]
    async with connected(uncutting()) as (client, gateway):
        assert (await client.write(NAMESPACE, keys, objects)).is_all_ok
        memory = [bytearray(4 * L) for _ in keys]
        read = await client.read(NAMESPACE, keys, memory)
        assert [bytes(got[:n]) for got, n in zip(memory, read.lengths, strict=True)] == objects
        assert (await client.exist(NAMESPACE, keys)).is_all_ok
        assert (await client.check(NAMESPACE, keys)).is_all_ok
        assert (await client.delete(NAMESPACE, keys)).is_all_ok
        kinds = [type(request.message) for request in gateway.sessions[0].requests]
        assert kinds == [Write, Write, Read, Read, Read, Exist, Check, Read, Check, Read, Delete, Delete]


async def test_ten_thousand_keys_in_one_exist():
    keys = [at.to_bytes(40, "big") for at in range(10_000)]
    async with connected(uncutting()) as (client, gateway):
        big = [pattern(at, 2 * L) for at in range(100)]
        await client.write(NAMESPACE, keys[:100], big)
        for key in keys[100:5000]:
            gateway.put(NAMESPACE, key, b"small")
        del gateway.objects[NAMESPACE, names_of(gateway, keys[50])[1]]
        before = len(gateway.sessions[0].requests)
        found = await client.exist(NAMESPACE, keys)
        assert (found.leading_ok, found.count_ok) == (50, 4999)
        assert len(gateway.sessions[0].requests) - before == 2


@pytest.mark.timeout(180)
async def test_more_fragments_than_one_round_has():
    """300 objects of 64 fragments: what one call makes of keys at a time has a limit."""
    keys = [b"%04d" % at for at in range(300)]
    async with connected(uncutting(64)) as (client, gateway):
        objects = [pattern(at, 64 * 64) for at in range(300)]
        assert (await client.write(NAMESPACE, keys, objects)).is_all_ok
        memory = [bytearray(64 * 64) for _ in keys]
        assert (await client.read(NAMESPACE, keys, memory)).is_all_ok
        assert memory == objects
        assert (await client.exist(NAMESPACE, keys)).is_all_ok
        vectors = [request.message.keys for request in gateway.sessions[0].requests]
        assert max(map(len, vectors)) <= MAX_FRAGMENTS


@st.composite
def scenes(draw):
    """L, the other limits, sizes of objects, room for each, whether the gateway cuts, bytes of its frames."""
    command = draw(st.integers(MANIFEST_BYTES, 300))
    limits = {
        "max_payload_bytes": draw(st.integers(64, 700)),
        "max_items": draw(st.integers(1, 9)),
        "max_requests": draw(st.integers(1, 5)),
        "max_inflight_bytes": draw(st.integers(command, 5000)),
    }
    lengths = draw(st.lists(st.integers(0, 1000) | st.just(64), min_size=1, max_size=6))
    rooms = draw(st.lists(st.integers(0, 1100), min_size=len(lengths), max_size=len(lengths)))
    return command, limits, lengths, rooms, draw(st.booleans()), draw(st.integers(20, 900))


# Nothing is drawn inside the coroutine: Hypothesis's way of ending an example must not pass through a task.
@pytest.mark.timeout(180)  # a connection for each example
@settings(max_examples=25)
@given(scene=scenes())
async def test_random_sizes_limits_and_buffers(scene):
    command, limits, lengths, rooms, cuts_itself, frame = scene
    keys = [b"k" * (1 + at % 3) + bytes([at]) for at in range(len(lengths))]
    objects = [
        LOOKALIKE if length == 64 and at % 2 else pattern(at, length) for at, length in enumerate(lengths)
    ]
    if cuts_itself:
        limits["max_inflight_bytes"] = 5000
    gateway = MemoryGateway(
        fragments=cuts_itself, limits=Limits(max_command_bytes=command, **limits), frame_bytes=frame
    )
    async with connected(gateway) as (client, _):
        assert (await client.write(NAMESPACE, keys, objects)).is_all_ok
        assert (await client.exist(NAMESPACE, keys)).is_all_ok
        memory = [bytearray(room) for room in rooms]
        read = await client.read(NAMESPACE, keys, memory)
        for each, room, status, length, got in zip(
            objects, rooms, read.statuses, read.lengths, memory, strict=True
        ):
            assert (status, length) == ((0, len(each)) if len(each) <= room else (TOO_LARGE, 0))
            assert bytes(got[:length]) == each[:length]
        assert (await client.check(NAMESPACE, keys)).is_all_ok
        assert (await client.delete(NAMESPACE, keys)).is_all_ok
        assert gateway.violations == []


# ------------------------------------------------------------ order


ONE_AT_A_TIME = {"max_items": 1}
#: Two connections for each order, in asyncio's debug mode: seconds, and more on a busy machine.
every_order = pytest.mark.timeout(180)


def orders(one: int, other: int) -> list[tuple[int, ...]]:
    """All ways to merge that many requests of two clients."""
    places = itertools.combinations(range(one + other), one)
    return [tuple(0 if at in chosen else 1 for at in range(one + other)) for chosen in map(set, places)]


async def write(client, data):
    return (await client.write(NAMESPACE, [KEY], [data])).statuses


@every_order
@pytest.mark.parametrize("old", [None, b"old", pattern(3, 2 * L)], ids=["new", "over small", "over large"])
async def test_two_writers_of_one_key_in_every_order_leave_exactly_one_of_theirs(old):
    count = 2 if old else 3
    versions = [pattern(1, count * L - 9), pattern(2, count * L - 9)]
    calls = [lambda client, data=data: write(client, data) for data in versions]
    for order in orders(count + 1, count + 1):
        async with connected(uncutting(limits=ONE_AT_A_TIME)) as (client, gateway):
            if old is not None:
                await write(client, old)
            assert await in_turns(gateway, calls, order) == [b"\0", b"\0"]
            assert await get(client) == versions[order[-1]]


async def test_a_large_and_a_small_writer_in_every_order():
    versions = [pattern(1, 2 * L + 1), b"small"]
    calls = [lambda client, data=data: write(client, data) for data in versions]
    for order in orders(4, 1):
        async with connected(uncutting(limits=ONE_AT_A_TIME)) as (client, gateway):
            await in_turns(gateway, calls, order)
            assert await get(client) == versions[order[-1]]


async def test_read_while_another_writes_gets_the_old_or_the_new():
    old, new = pattern(1, 2 * L - 1), pattern(2, 2 * L)

    async def read(client):
        memory = bytearray(3 * L)
        result = await client.read(NAMESPACE, [KEY], [memory])
        return result.statuses, bytes(memory[: result.lengths[0]])

    seen = set()
    for order in orders(3, 3):
        async with connected(uncutting(limits=ONE_AT_A_TIME)) as (client, gateway):
            await write(client, old)
            _, (status, got) = await in_turns(gateway, [lambda c: write(c, new), read], order)
            assert status == b"\0"
            assert got in (old, new)
            seen.add(got)
    assert seen == {old, new}


@every_order
async def test_delete_while_another_reads_or_writes_leaves_it_whole_or_absent():
    data = pattern(1, L + 1)

    async def delete(client):
        return (await client.delete(NAMESPACE, [KEY])).statuses

    async def read(client):
        memory = bytearray(3 * L)
        result = await client.read(NAMESPACE, [KEY], [memory])
        return result.statuses, bytes(memory[: result.lengths[0]])

    for order in orders(3, 4):
        async with connected(uncutting(limits=ONE_AT_A_TIME)) as (client, gateway):
            await write(client, data)
            (status, got), deleted = await in_turns(gateway, [read, delete], order)
            assert (status, got) in ((b"\0", data), (b"\1", b""))
            assert deleted == b"\0"
            assert gateway.objects == {}
    for order in orders(3, 4):  # the same version again: its fragments have the same names
        async with connected(uncutting(limits=ONE_AT_A_TIME)) as (client, gateway):
            await write(client, data)
            await in_turns(gateway, [lambda c: write(c, data), delete], order)
            assert await get(client) in (data, NOT_FOUND)
            assert await write(client, data) == b"\0"
            assert await get(client) == data


async def test_a_fence_waits_for_every_step_and_holds_up_what_comes_after():
    async with connected(uncutting()) as (client, gateway):
        turns = Turns(gateway)
        outcomes: list[str] = []

        async def note(name, call) -> None:
            await call
            outcomes.append(name)

        async with anyio.create_task_group() as tasks:
            for name, call in [
                ("write", client.write(NAMESPACE, [KEY], [pattern(1, 3 * L)])),
                ("fence", client.fence()),
                ("exist", client.exist(NAMESPACE, [b"other"])),
                ("second fence", client.fence()),
                ("ping", client.ping()),
            ]:
                tasks.start_soon(note, name, call)
                await anyio.wait_all_tasks_blocked()
            turns.give_all()
        kinds = [type(message).__name__ for _, message in turns.log]
        assert kinds == ["Write", "Write", "Fence", "Read", "Fence", "Ping"]
        assert outcomes == ["write", "fence", "exist", "second fence", "ping"]


async def test_a_cancelled_fence_lets_everybody_go_and_the_next_one_still_waits():
    async with connected(uncutting()) as (client, gateway):
        turns = Turns(gateway)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [KEY], [pattern(1, 3 * L)])
            await anyio.wait_all_tasks_blocked()
            async with anyio.create_task_group() as doomed:
                doomed.start_soon(client.fence)
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(client.delete, NAMESPACE, [b"other"])
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(client.fence)
                await anyio.wait_all_tasks_blocked()
                doomed.cancel_scope.cancel()
            turns.give_all()
        kinds = [type(message).__name__ for _, message in turns.log]
        assert kinds.index("Fence") == len(kinds) - 1
        assert sorted(kinds) == ["Delete", "Fence", "Read", "Write", "Write"]


async def test_a_gateway_that_cuts_is_asked_as_ever():
    """One request for each verb, and the fence goes out at once."""
    async with connected(MemoryGateway(limits=Limits(max_command_bytes=L))) as (client, gateway):
        turns = Turns(gateway)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [KEY], [pattern(1, 3 * L)])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.exist, NAMESPACE, [KEY])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.read, NAMESPACE, [KEY], [bytearray(3 * L)])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.delete, NAMESPACE, [KEY])
            await anyio.wait_all_tasks_blocked()
            sent = [type(p.message) for p in gateway.sessions[0].requests]
            assert sent == [Write], "the script holds the session up"
            turns.give_all()
        kinds = [type(message) for _, message in turns.log]
        assert kinds == [Write, Fence, Exist, Read, Delete]


async def test_another_client_reads_what_this_one_cut():
    async with connected(uncutting()) as (client, gateway):
        await write(client, pattern(1, 3 * L))
        gateway.limits = Limits(max_command_bytes=2 * L)  # told to the next one
        async with client_of(gateway) as other:
            assert await get(other) == pattern(1, 3 * L)
            await other.write(NAMESPACE, [KEY], [pattern(2, 3 * L)])
        assert manifest_of(gateway).sizes() == [2 * L, L]
        assert await get(client) == pattern(2, 3 * L)
