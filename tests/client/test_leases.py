"""Leases in the client (W6): none is left behind, and none is believed in for too long."""

from typing import Any

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_client import Client, ClientConfig, Lease, Timeouts
from adp_client.errors import LocalProtocolError, RequestTimeout
from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import Delete, Exist, ExistReply, Limits, Ping, Read, Release
from adp_client.testing import MemoryGateway
from client.fragmented import client_of, names_of, uncutting
from client.support import ENDPOINT, NAMESPACE, PATIENT, cancel_at, connected, leftovers
from gateway.waiting import on_a_jumping_clock, until

pytestmark = pytest.mark.anyio

KEYS = [b"key-%d" % at for at in range(6)]
ABSENT = [b"no-%02d" % at for at in range(6)]
OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND


def stocked(**settings: Any) -> MemoryGateway:
    gateway = MemoryGateway(**settings)
    for key in KEYS:
        gateway.put(NAMESPACE, key, b"value of " + key)
    return gateway


async def lease_on(client: Client, *keys: bytes, seconds: float = 30) -> Lease:
    result = await client.exist(NAMESPACE, keys, lease_seconds=seconds)
    assert result.is_all_ok
    assert result.lease is not None
    return result.lease


def asked(gateway: MemoryGateway, kind: type) -> list[Any]:
    return [
        event.message
        for session in gateway.sessions
        for event in session.requests
        if isinstance(event.message, kind)
    ]


async def test_a_lease_from_its_grant_to_its_release():
    async with connected(stocked()) as (client, gateway):
        result = await client.exist(NAMESPACE, [*KEYS, *ABSENT], lease_seconds=30)
        assert result.statuses == bytes(6) + b"\1" * 6
        lease = result.lease
        assert lease is not None
        assert (lease.granted_seconds, lease.is_live) == (30, True)
        assert lease.expires_at <= anyio.current_time() + 30
        deleted = anyio.Event()

        async def delete() -> None:
            assert (await client.delete(NAMESPACE, KEYS[:1])).is_all_ok
            deleted.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delete)
            await until(lambda: asked(gateway, Delete))
            buffer = bytearray(14)
            assert (await client.read(NAMESPACE, KEYS[:1], [buffer])).is_all_ok
            assert bytes(buffer) == b"value of key-0"
            again = await client.exist(NAMESPACE, KEYS[:2], lease_seconds=30)
            assert again.statuses == bytes([NOT_FOUND, OK])
            assert again.lease is not None
            await again.lease.release()
            assert not deleted.is_set()
            await lease.release()
            assert not lease.is_live
        await lease.release()
        assert len(asked(gateway, Release)) == 2
        assert len(gateway.leases) == 0
        assert (client.stats().leases_granted, client.stats().leases_released) == (2, 2)


async def test_a_lease_is_a_context():
    async with connected(stocked()) as (client, gateway):

        async def fail() -> None:
            async with await lease_on(client, *KEYS) as lease:
                leases.append(lease)
                raise KeyError("a reader that fails")

        leases: list[Lease] = []
        with pytest.raises(KeyError):
            await fail()
        assert not leases[0].is_live
        assert len(gateway.leases) == 0


async def test_nothing_found_and_nothing_asked_is_no_lease():
    async with connected(stocked()) as (client, gateway):
        assert (await client.exist(NAMESPACE, ABSENT, lease_seconds=1)).lease is None
        assert (await client.exist(NAMESPACE, KEYS)).lease is None
        assert (await client.exist(NAMESPACE, [], lease_seconds=1)).lease is None
        assert client.stats().leases_granted == 0
        assert asked(gateway, Release) == []


@pytest.mark.parametrize("settings", [{"features": Feature.NONE}, {"limits": Limits(max_lease_ms=0)}])
async def test_a_gateway_without_leases_answers_as_usual(settings):
    async with connected(stocked(**settings)) as (client, gateway):
        result = await client.exist(NAMESPACE, [*KEYS, *ABSENT], lease_seconds=30)
        assert (result.statuses, result.lease) == (bytes(6) + b"\1" * 6, None)
        assert [message.lease_ms for message in asked(gateway, Exist)] == [0]
        assert gateway.violations == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
async def test_what_is_no_time_for_a_lease(seconds):
    async with connected(stocked()) as (client, _):
        with pytest.raises(LocalProtocolError):
            await client.exist(NAMESPACE, KEYS, lease_seconds=seconds)


@pytest.mark.parametrize("seconds", ["5", b"5", True, [5]])
async def test_a_lease_is_a_number_of_seconds(seconds):
    words = f"a lease is a number of seconds, not {type(seconds).__name__}: {seconds!r}"
    async with connected(stocked()) as (client, _):
        with pytest.raises(LocalProtocolError) as caught:
            await client.exist(NAMESPACE, KEYS, lease_seconds=seconds)
    assert str(caught.value) == words


async def test_the_time_is_cut_to_what_the_gateway_grants():
    async with connected(stocked(limits=Limits(max_lease_ms=1500))) as (client, gateway):
        assert (await lease_on(client, *KEYS, seconds=1e9)).granted_seconds == 1.5
        assert (await lease_on(client, *KEYS, seconds=1e-9)).granted_seconds == 0.001
        assert [message.lease_ms for message in asked(gateway, Exist)] == [1500, 1]


# ---------------------------------------------------------------- several requests


async def test_a_lease_over_several_requests_goes_back_in_one():
    async with connected(stocked(limits=Limits(max_items=4))) as (client, gateway):
        lease = await lease_on(client, *KEYS, KEYS[0])
        assert len(gateway.leases) == 2
        await lease.release()
        (release,) = asked(gateway, Release)
        assert sorted(release.lease_ids) == [1, 2]
        assert len(gateway.leases) == 0


async def test_one_request_without_a_lease_is_a_call_without():
    """What is OK is leased, or there is no lease: half a promise helps nobody."""
    async with connected(stocked(limits=Limits(max_items=4))) as (client, gateway):

        async def script(session, event) -> bool:
            if isinstance(event.message, Exist) and KEYS[5] in event.message.keys:
                statuses = bytes(key not in KEYS for key in event.message.keys)
                await session.send_reply(event.request_id, ExistReply(statuses=statuses))
                return True
            return False

        gateway.script = script
        result = await client.exist(NAMESPACE, KEYS, lease_seconds=30)
        assert (result.is_all_ok, result.lease) == (True, None)
        await until(lambda: not len(gateway.leases))
        # A request that has found nothing needs no lease.
        result = await client.exist(NAMESPACE, [*KEYS[:4], *ABSENT[:2], *ABSENT], lease_seconds=30)
        assert result.lease is not None
        await result.lease.release()


async def test_every_frame_of_an_answer_counts_once():
    async with connected(stocked()) as (client, gateway):

        async def script(session, event) -> bool:
            if not isinstance(event.message, Exist):
                return False
            for first in range(6):
                reply = ExistReply(first=first, statuses=b"\0", lease_id=7, lease_ms=9000 - first)
                await session.send_reply(event.request_id, reply, is_final=first == 5)
            return True

        gateway.script = script
        lease = await lease_on(client, *KEYS)
        assert lease.granted_seconds == pytest.approx(8.995)
        await lease.release()
        assert asked(gateway, Release) == [Release(lease_ids=(7,))]
        assert client.stats().leases_granted == 1


# ---------------------------------------------------------------- objects that the client has cut


async def test_a_lease_on_what_the_client_cut_is_on_every_fragment():
    async with connected(uncutting()) as (client, gateway), client_of(gateway) as other:
        large, small = bytes(range(250)), b"small"
        assert (await client.write(NAMESPACE, KEYS[:2], [large, small])).is_all_ok
        result = await client.exist(NAMESPACE, KEYS[:3], lease_seconds=30)
        lease = result.lease
        assert (result.statuses, lease is None) == (bytes([OK, OK, NOT_FOUND]), False)
        fragments = names_of(gateway, KEYS[0])
        assert len(fragments) == 3
        assert all(gateway.leases.is_held((NAMESPACE, name)) for name in [*KEYS[:2], *fragments])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.delete, NAMESPACE, KEYS[:1])
            await until(lambda: asked(gateway, Delete))
            late = await client.exist(NAMESPACE, KEYS[:2], lease_seconds=30)
            assert late.statuses == bytes([NOT_FOUND, OK])
            await late.lease.release()
            memory = bytearray(250)
            assert (await client.read(NAMESPACE, KEYS[:1], [memory])).is_all_ok
            assert memory == large
            await lease.release()
        assert set(gateway.objects) == {(NAMESPACE, KEYS[1])}
        assert len(gateway.leases) == 0


async def test_what_lacks_a_fragment_is_not_there_under_a_lease_either():
    async with connected(uncutting()) as (client, gateway):
        assert (await client.write(NAMESPACE, KEYS[:1], [bytes(250)])).is_all_ok
        del gateway.objects[NAMESPACE, names_of(gateway, KEYS[0])[1]]
        result = await client.exist(NAMESPACE, KEYS[:1], lease_seconds=30)
        assert (result.statuses, result.lease) == (bytes([NOT_FOUND]), None)
        await until(lambda: not len(gateway.leases))


async def test_the_leases_of_all_steps_are_of_one_connection():
    async with connected(uncutting()) as (client, gateway):
        assert (await client.write(NAMESPACE, KEYS[:1], [bytes(250)])).is_all_ok
        exists = 0

        async def script(session, event) -> bool:
            nonlocal exists
            exists += isinstance(event.message, Exist)
            if exists == 2:
                exists = 3
                session.transport.abort()
                return True
            return False

        gateway.script = script
        lease = await lease_on(client, KEYS[0])
        assert lease.is_live
        await until(lambda: len(gateway.leases) == 2)
        await lease.release()
        assert len(gateway.leases) == 0


@pytest.mark.parametrize("boot_id", [bytes(16), b"another boot id!"])
async def test_another_boot_between_the_steps_is_asked_from_the_beginning(boot_id):
    async with connected(uncutting()) as (client, gateway):
        assert (await client.write(NAMESPACE, KEYS[:1], [bytes(250)])).is_all_ok

        async def script(session, event) -> bool:
            if isinstance(event.message, Read):
                gateway.script = None
                gateway.restart(boot_id)
                return True
            return False

        gateway.script = script
        lease = await lease_on(client, KEYS[0])
        await until(lambda: len(gateway.leases) == 2)
        await lease.release()
        assert len(gateway.leases) == 0


# ---------------------------------------------------------------- callers who leave


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_bytes": 50, "capacity_bytes": 70},
        {"limits": Limits(max_requests=2, max_items=2)},
        {"limits": Limits(max_command_bytes=100), "fragments": False},
    ],
    ids=["plain", "slow wire", "small window", "cut by the client"],
)
async def test_b45_cancelled_at_every_checkpoint_and_no_lease_is_left(settings):
    async with connected(stocked(**settings)) as (client, gateway):
        at, was_cancelled = 0, True
        assert (await client.write(NAMESPACE, KEYS[:1], [bytes(350)])).is_all_ok
        while was_cancelled:
            at += 1
            call = client.exist(NAMESPACE, KEYS, lease_seconds=30)
            results: list[Any] = []

            async def keep(call: Any = call, results: list[Any] = results) -> None:
                results.append(await call)

            was_cancelled, _ = await cancel_at(keep(), at)
            for result in results:
                assert result.lease is not None
                await result.lease.release()
            await client.fence()  # by now whatever came of the cancelled call has been answered
            await until(lambda: not len(gateway.leases))
            assert leftovers(client) == []
        assert at > 2
        stats = client.stats()
        assert stats.leases_granted == stats.leases_released > 0
        assert gateway.violations == []
        assert len(gateway.sessions) == 1


async def test_an_answer_that_comes_too_late_is_given_back_at_once():
    async with connected(stocked()) as (client, gateway):
        go_on = anyio.Event()

        async def script(session, event) -> bool:
            if isinstance(event.message, Exist) and event.message.lease_ms:
                await go_on.wait()
            return False

        gateway.script = script
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lease_on, client, *KEYS)
                await until(lambda: asked(gateway, Exist))
                scope.cancel()
        assert len(gateway.leases) == 0
        go_on.set()
        await until(lambda: client.stats().leases_released)
        await until(lambda: not len(gateway.leases))
        assert client.stats().leases_granted == client.stats().replies_abandoned == 1
        assert (await client.delete(NAMESPACE, KEYS)).is_all_ok
        assert len(gateway.sessions) == 1


async def test_a_release_that_is_cancelled_is_on_its_way():
    async with connected(stocked()) as (client, gateway):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            lease = await lease_on(client, *KEYS)
            was_cancelled, _ = await cancel_at(lease.release(), at)
            assert not lease.is_live
            await until(lambda: not len(gateway.leases))
        assert at > 1


# ---------------------------------------------------------------- order and window


async def test_releases_wait_for_the_window_and_then_go_first_and_together():
    async with connected(stocked(limits=Limits(max_requests=1))) as (client, gateway):
        leases = [await lease_on(client, key) for key in KEYS]
        go_on = anyio.Event()

        async def script(session, event) -> bool:
            if isinstance(event.message, Ping):
                await go_on.wait()
            return False

        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.ping)
            await until(lambda: asked(gateway, Ping))
            tasks.start_soon(client.exist, NAMESPACE, KEYS)
            tasks.start_soon(client.delete, NAMESPACE, KEYS)
            await wait_all_tasks_blocked()
            for lease in leases:
                tasks.start_soon(lease.release)
            await wait_all_tasks_blocked()
            assert len(gateway.leases) == 6
            go_on.set()
        kinds = [type(event.message) for event in gateway.sessions[0].requests[6:]]
        assert kinds == [Ping, Release, Exist, Delete]
        assert gateway.objects == {}


async def test_more_leases_than_a_request_takes_go_in_several():
    async with connected(stocked(limits=Limits(max_items=4))) as (client, gateway):
        leases = [await lease_on(client, KEYS[0]) for _ in range(10)]
        async with anyio.create_task_group() as tasks:
            for lease in leases:
                tasks.start_soon(lease.release)
        assert sum(len(release.lease_ids) for release in asked(gateway, Release)) == 10
        assert len(gateway.leases) == 0
        assert gateway.violations == []


# ---------------------------------------------------------------- the end of a connection


@pytest.mark.parametrize("boot_id", [None, b"another boot id!"])
async def test_a_lost_connection_has_ended_its_leases(boot_id):
    async with connected(stocked()) as (client, gateway):
        lease = await lease_on(client, *KEYS)
        if boot_id is None:
            gateway.cut()
        else:
            gateway.restart(boot_id)
        await until(lambda: client.stats().connects == 2)
        assert not lease.is_live
        await lease.release()
        assert asked(gateway, Release) == []
        assert (await client.delete(NAMESPACE, KEYS)).is_all_ok


async def test_a_release_that_loses_its_connection_is_done():
    async with connected(stocked()) as (client, gateway):
        lease = await lease_on(client, *KEYS)

        async def script(session, event) -> bool:
            session.transport.abort()
            return True

        gateway.script = script
        await lease.release()
        assert not lease.is_live
        await until(lambda: not len(gateway.leases))


async def test_a_lease_is_asked_for_again_as_a_whole_when_the_connection_was_lost():
    async with connected(stocked(limits=Limits(max_items=4))) as (client, gateway):
        seen = 0

        async def script(session, event) -> bool:
            nonlocal seen
            seen += 1
            if seen == 2:
                session.transport.abort()
                return True
            return False

        gateway.script = script
        lease = await lease_on(client, *KEYS)
        assert lease.is_live
        assert len(gateway.sessions) == 2
        assert [message.keys for message in asked(gateway, Exist)] == [
            tuple(KEYS[:4]),
            tuple(KEYS[4:]),
            tuple(KEYS[:4]),
            tuple(KEYS[4:]),
        ]
        await until(lambda: len(gateway.leases) == 2)
        await lease.release()
        assert len(gateway.leases) == 0


async def test_a_lease_is_not_relied_on_while_the_gateway_drains():
    async with connected(stocked()) as (client, gateway):
        lease = await lease_on(client, *KEYS)
        await gateway.sessions[0].send_goodbye()
        await until(lambda: not lease.is_live)
        await lease.release()
        await until(lambda: client.stats().connects == 2)
        assert asked(gateway, Release) == []


async def test_closing_the_client_ends_its_leases():
    async with stocked() as gateway:
        settings = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT)
        async with Client(settings, dial=gateway.dial) as client:
            lease = await lease_on(client, *KEYS)
            assert len(gateway.leases) == 1
        assert not lease.is_live
        await until(lambda: not len(gateway.leases))
        await lease.release()


# ---------------------------------------------------------------- time


@on_a_jumping_clock
async def test_a_lease_is_believed_in_no_longer_than_the_gateway_keeps_it():
    async with connected(stocked()) as (client, gateway):

        async def script(session, event) -> bool:
            await anyio.sleep(1)  # autojump_threshold: no time at all
            return False

        gateway.script = script
        begun = anyio.current_time()
        lease = await lease_on(client, *KEYS, seconds=10)
        assert anyio.current_time() - begun == pytest.approx(1)
        assert lease.expires_at - begun == pytest.approx(10)
        await anyio.sleep(8.9)
        assert lease.is_live
        await anyio.sleep(0.2)
        assert not lease.is_live
        assert len(gateway.leases) == 1
        await anyio.sleep(1)
        assert len(gateway.leases) == 0
        await lease.release()


@on_a_jumping_clock
async def test_an_exist_that_times_out_leaves_no_lease():
    timeouts = Timeouts(exist_seconds=2, idle_ping_seconds=60)
    async with connected(stocked(limits=Limits(max_items=4)), timeouts=timeouts) as (client, gateway):

        async def script(session, event) -> bool:
            return session is gateway.sessions[0] and KEYS[5] in getattr(event.message, "keys", ())

        gateway.script = script
        with pytest.raises(RequestTimeout):
            await client.exist(NAMESPACE, KEYS, lease_seconds=30)
        assert client.stats().leases_granted == 1
        await until(lambda: not len(gateway.leases))


@on_a_jumping_clock
async def test_a_gateway_that_does_not_answer_a_release_is_given_up():
    timeouts = Timeouts(request_seconds=30, idle_ping_seconds=60)
    async with connected(stocked(), timeouts=timeouts) as (client, gateway):
        lease = await lease_on(client, *KEYS, seconds=50)

        async def script(session, event) -> bool:
            return isinstance(event.message, Release)

        gateway.script = script
        begun = anyio.current_time()
        await lease.release()
        assert anyio.current_time() - begun == pytest.approx(30)
        await until(lambda: not len(gateway.leases))
