"""A session of every verb, cut after each byte in each direction.

After the cut each verb answers right or raises a LinkError, and a connection later everything works and
nobody sees half an object.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from adp_client import Client, ClientConfig
from adp_client.errors import LinkError
from adp_client.protocol.messages import Limits
from adp_client.testing import Faults, FaultyTransport, MemoryGateway
from client.real import RealGateway
from client.support import ENDPOINT, NAMESPACE, PATIENT, QUICK, leftovers, pattern

#: A session for each byte. Not asyncio's debug mode: that alone takes most of the time.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(240),
    pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"]),
]
LIMITS = Limits(max_payload_bytes=20)
CONFIG = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
IS_FULL = bool(os.environ.get("ADP_TORTURE"))
#: On the real gateway every session is work for threads: all of them only on request.
STRIDE = 1 if IS_FULL else 23

WHOLE, PARTS, KEPT, GONE = pattern(1, 20), pattern(2, 45), pattern(3, 18), pattern(4, 9)


class Session:
    """The verbs of one client on keys of its own."""

    def __init__(self, client: Client, number: int) -> None:
        self._client = client
        self.whole, self.parts, self.kept, self.gone = (b"%05d-%d" % (number, at) for at in range(4))

    async def prepare(self) -> None:
        written = await self._client.write(NAMESPACE, [self.kept, self.gone], [KEPT, GONE])
        assert written.is_all_ok

    def verbs(self) -> list[tuple[Callable[[], Awaitable[Any]], Callable[[Any], bool]]]:
        client = self._client
        buffer = bytearray(40)
        return [
            (lambda: client.ping(), lambda r: r >= 0),
            (lambda: client.write(NAMESPACE, [self.whole], [WHOLE]), lambda r: r.is_all_ok),
            (lambda: client.write(NAMESPACE, [self.parts], [PARTS]), lambda r: r.is_all_ok),
            (lambda: client.fence(), lambda r: r is None),
            (
                lambda: client.read(NAMESPACE, [self.kept], [buffer]),
                lambda r: r.is_all_ok and bytes(buffer[: r.lengths[0]]) == KEPT,
            ),
            (lambda: client.exist(NAMESPACE, [self.kept]), lambda r: r.is_all_ok),
            (lambda: client.check(NAMESPACE, [self.kept]), lambda r: r.is_all_ok),
            (lambda: client.delete(NAMESPACE, [self.gone]), lambda r: r.is_all_ok),
        ]

    async def talk(self) -> list[str]:
        """Every verb once; the ones that failed, by the name of their error."""
        failed = []
        for verb, is_right in self.verbs():
            try:
                assert is_right(await verb())
            except LinkError as exc:
                failed.append(type(exc).__name__)
        return failed

    async def look(self) -> None:
        """With a whole network: nothing is half there, and what was acknowledged or left alone is."""
        names = [self.whole, self.parts, self.kept, self.gone]
        right = [WHOLE, PARTS, KEPT, GONE]
        buffers = [bytearray(64) for _ in names]
        read = await self._client.read(NAMESPACE, names, buffers)
        for at, data in enumerate(right):
            assert read.statuses[at] in (0, 1)
            assert read.statuses[at] == 1 or bytes(buffers[at][: read.lengths[at]]) == data
        assert read.statuses[:3] == bytes(3), "the WRITEs are repeated until they are answered"
        assert (await self._client.write(NAMESPACE, [self.gone], [GONE])).is_all_ok
        assert await self.talk() == []
        assert leftovers(self._client) == []


async def one(
    gateway: MemoryGateway | RealGateway, number: int, **cut: int
) -> tuple[list[str], dict[str, int]]:
    """A session whose first connection has this fault. Preparation is on a connection before it.

    Returns which verbs failed, and how many bytes that connection had moved then.
    """
    async with Client(CONFIG, dial=gateway.dial) as client:
        await Session(client, number).prepare()
    made: list[FaultyTransport] = []

    def wrap(inner):
        made.append(FaultyTransport(inner, Faults() if made else Faults(**cut)))
        return made[-1]

    gateway.wrap = wrap
    async with Client(CONFIG, dial=gateway.dial) as client:
        session = Session(client, number)
        failed = await session.talk()
        moved = {"received": made[0].received_bytes, "sent": made[0].sent_bytes}
        await session.look()
    gateway.wrap = lambda inner: inner
    return failed, moved


@pytest.mark.parametrize("direction", ["received", "sent"])
async def test_cut_after_every_byte(direction, anyio_backend):
    """Odd ones on asyncio, even ones on trio; on request all on both."""
    step = 1 if IS_FULL else 2
    begin = 2 if anyio_backend == "trio" and not IS_FULL else 1
    async with MemoryGateway(limits=LIMITS, frame_bytes=10) as gateway:
        failed, moved = await one(gateway, 0)
        assert failed == []
        assert moved[direction] > 500
        seen: set[str] = set()
        for number in range(begin, moved[direction], step):
            failed, _ = await one(gateway, number, **{f"cut_{direction}_at": number})
            assert len(failed) <= 1, "one connection is lost, and with it at most one request for good"
            seen.update(failed)
            gateway.objects.clear()
            gateway.sessions.clear()
            gateway.ended.clear()
        assert seen == {"LinkLost"}
        assert gateway.violations == []


@pytest.mark.parametrize("direction", ["received", "sent"])
async def test_cut_after_many_a_byte_of_the_real_gateway(direction):
    async with RealGateway(limits=LIMITS) as gateway:
        _, moved = await one(gateway, 0)
        for number in range(1, moved[direction], STRIDE):
            failed, _ = await one(gateway, number, **{f"cut_{direction}_at": number})
            assert len(failed) <= 1
        await gateway.all_left()
        gateway.assert_nothing_is_held()
