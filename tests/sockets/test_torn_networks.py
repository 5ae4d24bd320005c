"""The real client and the real gateway with a proxy between them that breaks at an exact byte."""

import contextlib
import os
import random
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from adp_client import BackoffConfig, Client, ClientConfig, ErrorCode, Timeouts
from adp_client.errors import LinkError
from client.support import cancel_at

from .inside import MIB, Inside, inside
from .proxy import Proxy, Way

pytestmark = pytest.mark.anyio

NAMESPACE = bytes(range(32))
QUICK = BackoffConfig(initial_seconds=0.001, cap_seconds=0.01)
#: Only what a test is about may run out of time on a busy machine.
PATIENT = Timeouts(
    connect_seconds=60, exist_seconds=60, request_seconds=60, idle_ping_seconds=60, release_seconds=60
)
SIZE = 300_000


def page(number: int, size: int = SIZE) -> bytes:
    return (number.to_bytes(8, "big") * (size // 8 + 1))[:size]


def key(number: int) -> bytes:
    return b"key %36d" % number


def client_of(proxy: Proxy, timeouts: Timeouts = PATIENT) -> Client:
    return Client(ClientConfig(endpoint=proxy.endpoint, timeouts=timeouts, backoff=QUICK))


async def settle(served: Inside, sessions: int) -> None:
    """Wait until so many sessions are left."""
    while served.server.counters.sessions != sessions:
        await anyio.lowlevel.checkpoint()


#: How much of the answer has passed when the caller leaves: around header and body, and between fragments.
@pytest.mark.parametrize("passed", [0, 1, 31, 32, 33, 70, 100_000, 262_144, SIZE])
async def test_b24_cancelled_while_the_answer_is_on_its_way(tmp_path: Path, passed: int) -> None:
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy, client_of(proxy) as client:
        await client.write(NAMESPACE, [key(1), key(2)], [page(1), page(2)])
        (connection,) = proxy.connections
        doomed = bytearray(SIZE)
        calls = [
            lambda: client.read(NAMESPACE, [key(1)], [doomed]),
            lambda: client.exist(NAMESPACE, [key(1)] * 20),
            lambda: client.write(NAMESPACE, [key(3)], [doomed]),
            lambda: client.delete(NAMESPACE, [key(4)] * 20),
            lambda: client.check(NAMESPACE, [key(1)] * 20),
        ]
        for call in calls if passed <= 33 else calls[:1]:
            way = connection.to_client
            way.reached, way.go = anyio.Event(), anyio.Event()
            way.stop_at = way.passed_bytes + passed
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await way.reached.wait()
                tasks.cancel_scope.cancel()
                way.go.set()
            doomed[:] = b"\xa5" * SIZE
            mine = bytearray(SIZE)
            assert (await client.read(NAMESPACE, [key(2)], [mine])).is_all_ok
            assert mine == page(2)
            assert (await client.exist(NAMESPACE, [key(1), key(9)])).statuses == b"\0\1"
            assert doomed == b"\xa5" * SIZE
        assert len(proxy.connections) == 1


async def test_b28_a_cancelled_write_in_the_middle_of_its_bytes_leaves_nothing_of_it(tmp_path: Path) -> None:
    """8 MiB, of which the gateway gets 100 KiB: the connection ends, and the gateway frees what it had."""
    timeouts = Timeouts(exist_seconds=60, idle_ping_seconds=60, release_seconds=0.1)
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy:
        first, _ = proxy.plan(to_gateway=Way(stop_at=100_000))
        async with client_of(proxy, timeouts) as client:
            memory = bytearray(page(1, 8 * MIB))
            found = []

            async def other() -> None:
                found.append(await client.exist(NAMESPACE, [key(1), key(2)]))

            async with anyio.create_task_group() as tasks:
                async with anyio.create_task_group() as doomed:
                    doomed.start_soon(client.write, NAMESPACE, [key(1)], [memory])
                    await first.reached.wait()
                    while not served.shared.arena.used_bytes:
                        await anyio.lowlevel.checkpoint()
                    tasks.start_soon(other)
                    doomed.cancel_scope.cancel()
                memory[:] = bytes(len(memory))
                assert (await client.write(NAMESPACE, [key(2)], [page(2, MIB)])).is_all_ok
            assert found[0].statuses[:1] == b"\1"
            passed = first.passed_bytes
            first.go.set()  # the gateway may read on, and finds the end
            await settle(served, 1)
            assert served.shared.arena.used_bytes == 0
            mine = bytearray(MIB)
            assert (await client.read(NAMESPACE, [key(1), key(2)], [bytearray(1), mine])).statuses == b"\1\0"
            assert mine == page(2, MIB)
            assert len(proxy.connections) == 2
            assert passed == 100_000


async def test_b38_a_writer_that_dies_after_a_fragment_leaves_the_key_free(tmp_path: Path) -> None:
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy, client_of(proxy) as reader:
        await reader.ping()
        for at in (300, 262_144, MIB, 3 * MIB):
            async with client_of(proxy) as writer:
                await writer.ping()
                connection = proxy.connections[-1]
                way = connection.to_gateway
                way.stop_at = way.passed_bytes + at
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(writer.write, NAMESPACE, [key(at)], [page(1, 4 * MIB)])
                    await way.reached.wait()
                    assert (await reader.exist(NAMESPACE, [key(at)])).statuses == b"\1"
                    proxy.is_refusing = True  # its process has died: it does not come back
                    connection.reset()
                    await connection.ended.wait()
                    tasks.cancel_scope.cancel()
            proxy.is_refusing = False
            await settle(served, 1)
            assert served.shared.arena.used_bytes == 0
            assert (await reader.exist(NAMESPACE, [key(at)])).statuses == b"\1"
            assert (await reader.write(NAMESPACE, [key(at)], [page(2, MIB)])).is_all_ok
            mine = bytearray(4 * MIB)
            assert (await reader.read(NAMESPACE, [key(at)], [mine])).lengths == (MIB,)
            assert mine[:MIB] == page(2, MIB)


@pytest.mark.parametrize("first", [0, 1])
async def test_b38_fragments_of_two_writers_interleave(tmp_path: Path, first: int) -> None:
    """One key, two sizes, both half way in; then one comes to its end before the other."""
    pages = [page(1, 3 * MIB), page(2, 5 * MIB)]
    ways: list[Way] = []
    clients: list[Client] = []
    done = [anyio.Event(), anyio.Event()]

    async def write(number: int) -> None:
        assert (await clients[number].write(NAMESPACE, [key(1)], [pages[number]])).is_all_ok
        done[number].set()

    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                clients.append(await stack.enter_async_context(client_of(proxy)))
                await clients[-1].ping()
                ways.append(proxy.connections[-1].to_gateway)
            async with anyio.create_task_group() as tasks:
                for number, way in enumerate(ways):
                    way.stop_at = way.passed_bytes + 2 * MIB
                    tasks.start_soon(write, number)
                    await way.reached.wait()
                for number in (first, 1 - first):
                    ways[number].go.set()
                    await done[number].wait()
            mine = bytearray(5 * MIB)
            result = await clients[0].read(NAMESPACE, [key(1)], [mine])
            assert mine[: result.lengths[0]] in pages
            assert served.store.stats().objects == 1
            assert served.shared.arena.used_bytes == 0
        await served.all_left()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_b31_a_silent_network_is_left_and_the_old_socket_is_not_waited_for(
    tmp_path: Path, is_busy: bool
) -> None:
    """Both ways are swallowed and nothing is closed."""
    timeouts = Timeouts(exist_seconds=60, request_seconds=60, idle_ping_seconds=0.2)
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy:
        async with client_of(proxy, timeouts) as client:
            await client.write(NAMESPACE, [key(1)], [page(1)])
            tasks_before = len(anyio.get_running_tasks())
            proxy.connections[0].hold()
            if is_busy:
                mine = bytearray(SIZE)
                assert (await client.read(NAMESPACE, [key(1)], [mine])).is_all_ok
                assert mine == page(1)
            while len(proxy.connections) < 2:
                await anyio.lowlevel.checkpoint()
            assert (await client.exist(NAMESPACE, [key(1)])).is_all_ok
            assert client.stats().connections_lost == 1
            assert not proxy.connections[0].ended.is_set(), "nobody has told the old one"
            # The new connection has its three tasks in the proxy and one or more in the gateway; the old
            # one's are still there, but not the client's.
            assert len(anyio.get_running_tasks()) <= tasks_before + 12
        for way in (proxy.connections[0].to_client, proxy.connections[0].to_gateway):
            way.go.set()
        await served.all_left()


@pytest.mark.parametrize("direction", ["to_gateway", "to_client"])
@pytest.mark.parametrize("then", ["close", "reset"])
async def test_b33_ended_at_any_byte_every_verb_is_right_or_a_link_error(
    tmp_path: Path, direction: str, then: str
) -> None:
    chooser = random.Random(f"{direction} {then}")
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy:
        for turn in range(25):
            way = Way(stop_at=chooser.choice([chooser.randrange(600), chooser.randrange(700_000)]), then=then)
            proxy.plan(**{direction: way})
            names = [key(2 * turn), key(2 * turn + 1)]
            pages = [page(turn), page(turn + 1)]
            async with client_of(proxy) as client:
                memory = [bytearray(SIZE) for _ in names]
                for verb, *arguments in (
                    (client.write, names, pages),
                    (client.read, names, memory),
                    (client.exist, names),
                    (client.check, names),
                    (client.delete, [b"nothing"]),
                ):
                    try:
                        result = await verb(NAMESPACE, *arguments)
                    except LinkError:
                        continue
                    assert result.is_all_ok or verb == client.delete
                assert (await client.read(NAMESPACE, names, memory)).is_all_ok
                assert memory == pages
        await served.all_left()


async def test_b30_many_writers_through_a_narrow_wire(tmp_path: Path) -> None:
    """The gateway takes nothing for a while; ten of fifty writers leave; the rest arrives whole."""
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy, client_of(proxy) as client:
        await client.ping()
        way = proxy.connections[0].to_gateway
        way.stop_at = way.passed_bytes + 100_000
        done: list[int] = []

        async def put(number: int) -> None:
            with anyio.CancelScope() as scope:
                scopes[number] = scope
                assert (await client.write(NAMESPACE, [key(number)], [page(number)])).is_all_ok
                done.append(number)

        scopes: dict[int, anyio.CancelScope] = {}
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(put, number)
            await way.reached.wait()
            for number in range(5, 15):
                scopes[number].cancel()
            tasks.start_soon(client.exist, NAMESPACE, [key(0)])
            tasks.start_soon(client.ping)
            way.go.set()
        assert set(done) >= set(range(50)) - set(range(5, 15))
        for number in done:
            mine = bytearray(SIZE)
            assert (await client.read(NAMESPACE, [key(number)], [mine])).is_all_ok
            assert mine == page(number)
        assert len(proxy.connections) == 1
        assert client.stats().connections_lost == 0


async def test_b40_a_slow_reader_gets_all_the_old_bytes(tmp_path: Path) -> None:
    """Deleted at a tenth, the device filled, the key written anew: never a mix, and the delete waits."""
    old, new = page(1, MIB), page(2, MIB)
    async with inside(tmp_path, capacity_bytes=8 * MIB, max_object_bytes=MIB) as served:
        direct = Client(ClientConfig(endpoint=str(served.endpoint), timeouts=PATIENT, backoff=QUICK))
        async with Proxy(served.endpoint) as proxy, client_of(proxy) as reader, direct as writer:
            await reader.ping()
            slow = proxy.connections[0].to_client
            await writer.write(NAMESPACE, [key(1)], [old])
            slow.stop_at = slow.passed_bytes + MIB // 10
            memory = bytearray(MIB)
            deleted = anyio.Event()

            async def delete() -> None:
                await writer.delete(NAMESPACE, [key(1)])
                deleted.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader.read, NAMESPACE, [key(1)], [memory])
                await slow.reached.wait()
                tasks.start_soon(delete)
                for number in range(10, 30):
                    await writer.write(NAMESPACE, [key(number)], [page(number, MIB)])
                await writer.write(NAMESPACE, [key(1)], [new])
                slow.go.set()
            assert memory == old
            assert deleted.is_set()
            again = bytearray(MIB)
            result = await writer.read(NAMESPACE, [key(1)], [again])
            assert result.statuses == b"\1" or again == new
        await served.all_left()


async def test_b44_a_full_device_is_a_status_or_an_eviction_never_a_lost_connection(tmp_path: Path) -> None:
    """Three times the capacity in mixed sizes; an object above the limit is refused."""
    sizes = [1, 262_143, 262_144, 262_145, MIB]
    async with inside(tmp_path, capacity_bytes=8 * MIB, max_object_bytes=MIB) as served:
        config = ClientConfig(endpoint=str(served.endpoint), timeouts=PATIENT, backoff=QUICK)
        async with Client(config) as client:
            for number in range(70):
                size = sizes[number % len(sizes)]
                result = await client.write(NAMESPACE, [key(number)], [page(number, size)])
                assert result.statuses[0] in (ErrorCode.OK, ErrorCode.CAPACITY_EXHAUSTED)
            large = await client.write(NAMESPACE, [key(99)], [bytes(MIB + 1)])
            assert large.statuses == bytes([ErrorCode.TOO_LARGE])
            assert served.store.stats().used_bytes <= 8 * MIB
            assert client.stats().connections_lost == 0
            assert (await client.exist(NAMESPACE, [key(69)])).is_all_ok


async def test_b45_lookups_that_are_never_followed_by_a_load_pin_nothing(tmp_path: Path) -> None:
    async with inside(tmp_path, capacity_bytes=8 * MIB, max_object_bytes=MIB) as served:
        config = ClientConfig(endpoint=str(served.endpoint), timeouts=PATIENT, backoff=QUICK)
        async with Client(config) as client:
            names = [key(number) for number in range(4)]
            await client.write(NAMESPACE, names, [page(number, MIB) for number in range(4)])
            for _ in range(10):
                await client.exist(NAMESPACE, names * 250)
            assert served.store.stats().leases == 0
            for number in range(10, 40):
                assert (await client.write(NAMESPACE, [key(number)], [page(number, MIB)])).is_all_ok
            assert (await client.exist(NAMESPACE, names)).count_ok == 0
        await served.all_left()


def count_sockets() -> int:
    """Descriptors of sockets: the store opens and closes files of its own."""
    count = 0
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the one of this listing
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")  # noqa: PTH115
    return count


@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_narrow", [False, True], ids=["plain", "byte by byte"])
async def test_b47_connects_and_calls_cancelled_at_random_points_leave_no_descriptor(
    tmp_path: Path, is_narrow: bool
) -> None:
    """500 handshakes and 500 calls; client, proxy and gateway all live in this process."""
    chooser = random.Random(47)
    count = 50 if is_narrow else 500
    async with inside(tmp_path) as served, Proxy(served.endpoint) as proxy:
        endpoint = proxy.endpoint if is_narrow else str(served.endpoint)
        config = ClientConfig(endpoint=endpoint, timeouts=PATIENT, backoff=QUICK)

        async def life() -> None:
            async with Client(config) as client:
                await client.wait_connected()
                await client.exist(NAMESPACE, [key(1)])

        async def all_ended() -> None:
            await served.all_left()
            while proxy.open_connections:
                await anyio.lowlevel.checkpoint()

        await life()
        await all_ended()
        before = count_sockets()
        for _ in range(count):
            if is_narrow:
                proxy.plan(to_client=Way(dribble=True), to_gateway=Way(dribble=True))
            await cancel_at(life(), chooser.randrange(1, 12))
        await all_ended()
        assert count_sockets() == before
        if is_narrow:
            return
        async with Client(config) as client:
            await client.write(NAMESPACE, [key(1)], [page(1)])
            for turn in range(count):
                memory = bytearray(SIZE)
                if turn % 2:
                    await cancel_at(client.read(NAMESPACE, [key(1)], [memory]), chooser.randrange(1, 5))
                else:
                    await cancel_at(client.write(NAMESPACE, [key(2)], [memory]), chooser.randrange(1, 6))
            assert (await client.read(NAMESPACE, [key(1)], [memory])).is_all_ok
            assert memory == page(1)
        await all_ended()
        assert count_sockets() == before
