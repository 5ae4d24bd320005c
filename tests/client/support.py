"""A client and a gateway in one process, and a way to cancel a call at exactly its n-th checkpoint."""

import functools
from collections.abc import AsyncGenerator, Awaitable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import attrs

from adp_client import BackoffConfig, Client, ClientConfig, Timeouts
from adp_client.link import Link
from adp_client.protocol.messages import Read
from adp_client.testing import MemoryGateway

NAMESPACE = bytes(range(32))
ENDPOINT = "tcp://gateway.test:7171"
#: No deadline may pass on a busy machine in a test that is not about deadlines.
PATIENT = Timeouts(exist_seconds=60, idle_ping_seconds=60, release_seconds=60)
QUICK = BackoffConfig(initial_seconds=1e-6, cap_seconds=1e-6, jitter=0.0)


@functools.cache
def pattern(seed: int, count: int) -> bytes:
    """`count` bytes that differ from place to place and from seed to seed."""
    return bytes((seed * 37 + at * 11 + (at >> 8)) & 0xFF for at in range(count))


@asynccontextmanager
async def connected(
    gateway: MemoryGateway | None = None,
    *,
    timeouts: Timeouts | None = None,
    backoff: BackoffConfig = QUICK,
    **config: Any,
) -> AsyncGenerator[tuple[Client, MemoryGateway]]:
    """A gateway and a client of it, after the handshake."""
    async with gateway or MemoryGateway() as gateway:
        settings = ClientConfig(endpoint=ENDPOINT, timeouts=timeouts or PATIENT, backoff=backoff, **config)
        async with Client(settings, dial=gateway.dial) as client:
            await client.wait_connected()
            yield client, gateway
            assert leftovers(client) == []


def leftovers(client: Client) -> list[str]:
    """What the current epoch still holds although nobody should be waiting."""
    return leftovers_of(client._link)


def leftovers_of(link: Link | None) -> list[str]:
    """The same for one link of several."""
    epoch = link.epoch if link is not None else None
    if epoch is None:
        return []
    held = [f"queued: {p.operation.verb.name}" for p in (*epoch._first, *epoch._later)]
    held += [
        f"open: {p.operation.verb.name}" for p in epoch._requests.values() if not p.operation.is_abandoned
    ]
    if epoch._landing is not None or epoch._sending is not None:
        held.append("somebody's memory")
    return held


@attrs.define
class Interrupted:
    """Drives a coroutine and cancels `scope` at its `at`-th suspension; counts all of them."""

    call: Awaitable[Any]
    scope: anyio.CancelScope
    at: int
    count: int = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self.call.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                trap = inner.send(value) if error is None else inner.throw(error)
            except StopIteration as stop:
                return stop.value
            self.count += 1
            if self.count == self.at:
                self.scope.cancel()
            value, error = None, None
            try:
                value = yield trap
            except BaseException as exc:
                error = exc


async def cancel_at(call: Awaitable[Any], at: int) -> tuple[bool, int]:
    """Run `call` and cancel it at suspension `at`; whether it was cancelled, and how often it suspended."""
    with anyio.CancelScope() as scope:
        driven = Interrupted(call, scope, at)
        await driven
    return scope.cancelled_caught, driven.count


class Gate:
    """Makes the gateway send half of its next READ reply, and the rest when `open` is set."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self.reached = anyio.Event()
        self.open = anyio.Event()
        gateway.script = self

    async def __call__(self, session, request) -> bool:
        if not isinstance(request.message, Read) or self.reached.is_set():
            return False
        send = session.transport.send

        async def send_in_halves(parts) -> None:
            data = b"".join(bytes(part) for part in parts)
            await send([data[: len(data) // 2]])
            self.reached.set()
            await self.open.wait()
            await send([data[len(data) // 2 :]])

        session.transport.send = send_in_halves
        try:
            await session.answer(request)
        finally:
            session.transport.send = send
        return True
