"""What one tenant can learn of, or do to, another: nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Check, Delete, ErrorMessage, Exist, Hello, Read
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.memory import MemoryStore
from adp_gateway.store.segments import SegmentStore
from adp_gateway.tenants import Door, Tenant, digest_of

from .house import House, house
from .objects import config
from .peer import NAMESPACE, Peer, content, key_of

pytestmark = pytest.mark.anyio

OK, MISS = ErrorCode.OK, ErrorCode.NOT_FOUND
QUOTA = 10 << 20
TENANTS = (
    Tenant(name="a", token_digest=digest_of(b"alpha"), quota_bytes=QUOTA),
    Tenant(name="b", token_digest=digest_of(b"beta"), quota_bytes=QUOTA),
)
ACCOUNTS = tuple(tenant.account for tenant in TENANTS)
TOKENS = {"a": b"alpha", "b": b"beta"}


@asynccontextmanager
async def tenement(kind: str) -> AsyncIterator[House]:
    """A house with two tenants, on either store."""
    door = Door(tenants=TENANTS)
    if kind == "memory":
        async with house(MemoryStore(capacity_bytes=40 << 20, accounts=ACCOUNTS), door=door) as home:
            yield home
        return
    settings = config("unused", capacity_bytes=40 << 20, segment_bytes=2 << 20, accounts=ACCOUNTS)
    with MemoryDevice(max_command_bytes=16 << 10) as device:
        async with SegmentStore.open(settings, device=device) as store, house(store, door=door) as home:
            yield home


async def dial(home: House, name: str) -> Peer:
    return await home.connect(Hello(token=TOKENS[name]))


def used(home: House, name: str) -> int:
    (found,) = (account for account in home.store.stats().accounts if account.name == name)
    return found.used_bytes


@pytest.mark.parametrize("kind", ["memory", "segments"])
async def test_b49_same_namespace_same_key_and_no_hit(kind: str) -> None:
    keys = (key_of(1), key_of(2))
    async with tenement(kind) as home:
        a, b = await dial(home, "a"), await dial(home, "b")
        await a.write({key_of(1): b"of a", key_of(2): b"of a"})
        assert await b.exist(*keys) == [MISS, MISS]
        assert await b.read(*keys) == [None, None]
        assert (await b.call(Check(namespace=NAMESPACE, keys=keys))).statuses == [MISS, MISS]
        assert (await b.call(Delete(namespace=NAMESPACE, keys=keys))).statuses == [MISS, MISS]
        assert await a.read(*keys) == [b"of a", b"of a"]
        assert await b.write({key_of(1): b"of b"}) == [OK]
        assert await a.read(key_of(1)) == [b"of a"]
        assert await b.read(key_of(1)) == [b"of b"]
        assert (await a.call(Delete(namespace=NAMESPACE, keys=keys))).statuses == [OK, OK]
        assert await b.read(*keys) == [b"of b", None]
        assert await (await dial(home, "b")).read(key_of(1)) == [b"of b"]


@pytest.mark.parametrize("kind", ["memory", "segments"])
async def test_the_name_that_the_store_uses_opens_no_door(kind: str) -> None:
    """Somebody who knows how the names are made, and everything else but the token."""
    async with tenement(kind) as home:
        a, b = await dial(home, "a"), await dial(home, "b")
        await a.write({key_of(1): b"of a"})
        for namespace in (TENANTS[0].stored(NAMESPACE), TENANTS[1].stored(NAMESPACE)):
            answer = await b.call(Exist(namespace=namespace, keys=(key_of(1),)))
            assert answer.statuses == [MISS]
            answer = await b.call(Read(namespace=namespace, keys=(key_of(1),), capacities=(100,)))
            assert answer.payloads() == [None]


@pytest.mark.parametrize("kind", ["memory", "segments"])
async def test_a_delete_does_not_wait_for_another_tenant_s_reader(kind: str) -> None:
    async with tenement(kind) as home:
        b = await dial(home, "b")
        await (await dial(home, "a")).write({key_of(1): b"of a"})
        await b.write({key_of(1): b"of b"})
        leases = home.store.open_read(TENANTS[0].stored(NAMESPACE), [key_of(1)])
        with anyio.fail_after(5):
            answer = await b.call(Delete(namespace=NAMESPACE, keys=(key_of(1),)))
        assert answer.statuses == [OK]
        leases[0].release()


@pytest.mark.parametrize("kind", ["memory", "segments"])
async def test_b44_thirty_mebibytes_from_four_connections_into_ten(kind: str) -> None:
    sizes = [1, 100_000, 1_000_000, 1 << 20, 0, 300_001]
    async with tenement(kind) as home:
        b = await dial(home, "b")
        others = {key_of(n): content(500_000, seed=n) for n in range(8)}
        assert await b.write(others) == [OK] * 8

        async def flood(number: int) -> None:
            a = await dial(home, "a")
            for turn in range(18):
                n = number * 100 + turn
                data = content(sizes[n % len(sizes)], seed=n)
                assert await a.write({key_of(n): data}) == [OK]
                assert used(home, "a") <= QUOTA

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(flood, number)
        assert used(home, "a") > QUOTA // 2
        assert await b.read(*others) == list(others.values())


async def test_larger_than_the_quota_is_told_and_the_connection_goes_on() -> None:
    tight = (Tenant(name="t", token_digest=digest_of(b"t"), quota_bytes=100_000),)
    store = MemoryStore(accounts=(tight[0].account,))
    async with house(store, door=Door(tenants=tight)) as home:
        peer = await home.connect(Hello(token=b"t"))
        objects = {key_of(1): bytes(99_000), key_of(2): bytes(10), key_of(3): bytes(10)}
        assert await peer.write(objects) == [ErrorCode.TOO_LARGE, OK, OK]
        assert await peer.exist(*objects) == [MISS, OK, OK]


@pytest.mark.parametrize("shown", [b"", b"alp", b"alpha and more", b"ALPHA", b"gamma"])
async def test_a_token_of_nobody_s(shown: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with tenement("memory") as home:
        peer = Peer(home.dial(), Hello(token=shown))
        await peer.transport.send([peer.connection.hello(peer.hello)])
        (notice,) = await peer.closed()
        assert isinstance(notice, ErrorMessage)
        assert notice.code is ErrorCode.UNAUTHENTICATED
        assert await (await dial(home, "a")).exist(key_of(1)) == [MISS]
    assert "UNAUTHENTICATED" in caplog.text
    if shown:
        assert shown.decode() not in caplog.text


async def test_log_lines_name_the_tenant(caplog: pytest.LogCaptureFixture) -> None:
    async with tenement("memory") as home:
        peer = await dial(home, "b")
        await peer.transport.send([b"nonsense"])
        await peer.closed()
    assert "peer 0 (b): closed: BAD_MAGIC" in caplog.text
    assert "beta" not in caplog.text
