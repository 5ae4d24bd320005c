"""A gateway that answers late, twice, short, with another's id, or never: each verb has one right outcome.

On a virtual clock.
"""

import contextlib
import itertools
import struct
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import attrs
import pytest
from trio.testing import MockClock

from adp_client import BackoffConfig, Client, Timeouts
from adp_client.errors import LinkLost, LocalProtocolError, RequestTimeout
from adp_client.protocol.constants import HEADER_BYTES, Opcode
from adp_client.protocol.frames import decode_header, encode_header
from adp_client.protocol.messages import Delete, Exist, Limits, Read
from adp_client.replay import MAYBE_APPLIED, Fate
from adp_client.testing import MemoryGateway, Session
from client.support import NAMESPACE, connected, leftovers
from client.verbs import KEYS, VERBS, read, stored

pytestmark = pytest.mark.anyio
TIMES = Timeouts(exist_seconds=2, request_seconds=30, idle_ping_seconds=1000, release_seconds=3)
BACKOFF = BackoffConfig(initial_seconds=1, factor=2, cap_seconds=8, jitter=0)


@pytest.fixture
def anyio_backend():
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


async def raw_answer(session: Session, request: Any) -> bytes:
    """The bytes of the right answer; they have not been sent, but the session believes so."""
    said: list[bytes] = []

    async def keep(parts: Any) -> None:
        said.extend(bytes(part) for part in parts)

    send, session.transport.send = session.transport.send, keep  # type: ignore[method-assign]
    try:
        await session.answer(request)
    finally:
        session.transport.send = send  # type: ignore[method-assign]
    return b"".join(said)


def with_id(raw: bytes, request_id: int) -> bytes:
    """The first frame of `raw` for another request."""
    header = attrs.evolve(decode_header(memoryview(raw[:HEADER_BYTES])), request_id=request_id)
    return encode_header(header) + raw[HEADER_BYTES:]


Say = Callable[[Session, Any], Awaitable[None]]


async def twice(session: Session, request: Any) -> None:
    raw = await raw_answer(session, request)
    await session.transport.send([raw + raw])


async def half(session: Session, request: Any) -> None:
    raw = await raw_answer(session, request)
    await session.transport.send([raw[: len(raw) // 2]])
    await anyio.wait_all_tasks_blocked()
    session.transport.abort()


async def of_another(session: Session, request: Any) -> None:
    raw = await raw_answer(session, request)
    await session.transport.send([with_id(raw, request.request_id + 1)])


def only_first(gateway: MemoryGateway, say: Say) -> Callable[[Session, Any], Awaitable[bool]]:
    """A script: `say` for the first request of a verb, and right answers afterwards."""
    count = itertools.count()

    async def script(session: Session, request: Any) -> bool:
        if next(count):
            return False
        await say(session, request)
        return True

    return script


def is_repeated(make: Any) -> bool:
    """Whether the client sends this verb again on a new connection."""
    name = make.__name__.removesuffix("_spanning_frames").upper()
    return MAYBE_APPLIED[Opcode[name]] is Fate.REPLAY


@pytest.mark.parametrize("make", VERBS)
async def test_b32_answered_twice_is_answered_once_and_costs_the_connection(make):
    async with connected(stored(), timeouts=TIMES) as (client, gateway):
        gateway.script = only_first(gateway, twice)
        call = make()
        assert call.is_right(await call.run(client))
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert len(gateway.sessions) == 2


@pytest.mark.parametrize("say", [half, of_another])
@pytest.mark.parametrize("make", VERBS)
async def test_b24_a_short_answer_or_anothers_is_nobodys(make, say):
    async with connected(stored(), timeouts=TIMES) as (client, gateway):
        gateway.script = only_first(gateway, say)
        call = make()
        if is_repeated(make):
            assert call.is_right(await call.run(client))
        else:
            with pytest.raises(LinkLost) as caught:
                await call.run(client)
            assert caught.value.maybe_applied
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert len(gateway.sessions) == 2
        assert leftovers(client) == []


@pytest.mark.parametrize("is_late", [True, False], ids=["late", "never"])
@pytest.mark.parametrize("make", VERBS)
async def test_b32_not_answered_in_time_is_a_timeout_and_the_late_answer_reaches_nobody(make, is_late):
    asked: list[tuple[Session, Any]] = []

    async def keep(session: Session, request: Any) -> None:
        asked.append((session, request))

    async with connected(stored(), timeouts=TIMES) as (client, gateway):
        gateway.script = only_first(gateway, keep)
        call = make()
        begun = anyio.current_time()
        with pytest.raises(RequestTimeout):
            await call.run(client)
        seconds = TIMES.exist_seconds if make.__name__ == "exist" else TIMES.request_seconds
        assert anyio.current_time() - begun == pytest.approx(seconds, abs=0.01)
        for memory in call.memory:
            memory[:] = b"\xa5" * len(memory)
        if is_late:
            ((session, request),) = asked
            with contextlib.suppress(LocalProtocolError, OSError):  # there is nobody to answer any more
                await session.answer(request)
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert all(memory == b"\xa5" * len(memory) for memory in call.memory)
        assert len(gateway.sessions) == 2
        assert client.stats().timeouts == 1


@pytest.mark.parametrize("is_parallel", [False, True], ids=["one by one", "all at once"])
async def test_b32_a_hundred_lookups_of_which_one_answer_is_lost_one_comes_twice_and_one_late(is_parallel):
    """Answers are matched by id: what happens to one never shifts the others."""
    names = [b"%03d" % number for number in range(100)]
    right = {name: number % 3 == 0 for number, name in enumerate(names)}
    late: list[tuple[Session, Any]] = []

    async def script(session: Session, request: Any) -> bool:
        if not isinstance(request.message, Exist):
            return False
        name = request.message.keys[0]
        if name == names[7]:
            return True
        if name == names[20] and session is gateway.sessions[0]:
            await twice(session, request)
            return True
        if name == names[30]:
            late.append((session, request))
            return True
        return False

    outcomes: dict[bytes, Any] = {}

    async def look_up(client: Client, name: bytes) -> None:
        try:
            outcomes[name] = bool((await client.exist(NAMESPACE, [name])).count_ok)
        except RequestTimeout as exc:
            outcomes[name] = exc

    async with connected(timeouts=TIMES) as (client, gateway):
        for name, is_there in right.items():
            if is_there:
                gateway.put(NAMESPACE, name, b"")
        gateway.script = script
        if is_parallel:
            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(look_up, client, name)
        else:
            for name in names:
                await look_up(client, name)
        for session, request in late:
            with pytest.raises((LocalProtocolError, OSError)):
                await session.answer(request)
        assert {name for name in names if isinstance(outcomes[name], RequestTimeout)} == {names[7], names[30]}
        assert all(outcomes[name] is right[name] for name in names if name not in (names[7], names[30]))
        assert len(gateway.sessions) <= 4
        await look_up(client, names[8])
        assert outcomes[names[8]] is right[names[8]]


@pytest.mark.parametrize("how", ["reset", "bad frame"])
async def test_b33_when_the_connection_dies_all_waiters_end_and_all_tables_are_empty(how):
    """20 open reads, 2 deletes that wait for them, 3 writes that wait for room: 25 ends within a second."""
    deleted: list[bytes] = []
    outcomes: list[str] = []

    async def script(session: Session, request: Any) -> bool:
        if session is not gateway.sessions[0]:
            if isinstance(request.message, Delete):
                deleted.extend(request.message.keys)
            return False
        return True  # reads are never answered, and the deletes wait for them

    async def note(call: Awaitable[Any]) -> None:
        try:
            outcomes.append(str((await call).count_ok))
        except LinkLost as exc:
            outcomes.append("maybe applied" if exc.maybe_applied else "not applied")

    async with connected(stored(limits=Limits(max_requests=22)), timeouts=TIMES) as (client, gateway):
        gateway.script = script
        epoch = client._link.epoch
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(note, client.read(NAMESPACE, KEYS[:1], [bytearray(4000)]))
            await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                tasks.start_soon(note, client.delete(NAMESPACE, KEYS[:1]))
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                tasks.start_soon(note, client.write(NAMESPACE, [b"w"], [b"v"]))
            await anyio.wait_all_tasks_blocked()
            assert epoch.open_count == 25
            begun = anyio.current_time()
            if how == "reset":
                gateway.cut()
            else:
                await gateway.sessions[0].transport.send([bytes(64)])
        assert anyio.current_time() - begun < 1
        assert sorted(outcomes) == ["1"] * 23 + ["maybe applied"] * 2
        assert deleted == [], "a DELETE is never repeated"
        assert epoch.open_count == 0
        assert (epoch._landing, epoch._sending) == (None, None)
        assert leftovers(client) == []
        core = client._link.epoch._connection
        assert (core.in_flight, core._window.requests, core._window.inflight_bytes) == (0, 0, 0)


async def test_b26_a_deadline_at_the_moment_that_room_is_granted_loses_nothing():
    """The window has room for one; it is free again exactly when the next one's time is up, or just not."""
    held = 2.0
    grants = 0

    async def script(session: Session, request: Any) -> bool:
        if isinstance(request.message, Read):
            await anyio.sleep(held)
        return False

    async with connected(stored(limits=Limits(max_requests=1)), timeouts=TIMES) as (client, gateway):
        gateway.script = script
        for turn in range(500):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.read, NAMESPACE, KEYS[:1], [bytearray(4000)])
                await anyio.wait_all_tasks_blocked()
                client.config = attrs.evolve(
                    client.config,
                    timeouts=attrs.evolve(TIMES, exist_seconds=held + (turn % 5 - 2) * 0.0005),
                )
                try:
                    assert (await client.exist(NAMESPACE, KEYS)).is_all_ok
                    grants += 1
                except RequestTimeout:
                    pass
            if client._link.epoch is not None:
                assert client._link.epoch.open_count == 0
        assert 100 <= grants <= 400
        core = client._link.epoch._connection
        assert (core.in_flight, core._window.requests, core._window.inflight_bytes) == (0, 0, 0)
        begun = anyio.current_time()
    assert anyio.current_time() - begun < 2
    assert client.stats().replies + client.stats().timeouts >= 1000


async def test_b36_a_gateway_whose_answers_are_always_rubbish_is_left_alone_for_longer_and_longer():
    """Every connection breaks the protocol at the first request; nothing is exchanged, so the delays grow."""
    rubbish = struct.pack("<IIII", 1, 2, 3, zlib.crc32(b"?")) * 4

    async def script(session: Session, request: Any) -> bool:
        await session.transport.send([rubbish])
        return True

    async with connected(timeouts=TIMES, backoff=BACKOFF) as (client, gateway):
        gateway.script = script
        begun = anyio.current_time()
        for _ in range(6):
            with pytest.raises((LinkLost, RequestTimeout)):
                await client.ping()
        assert anyio.current_time() - begun > 1 + 2 + 4 + 8 + 8 - 1
        assert len(gateway.sessions) <= 7
