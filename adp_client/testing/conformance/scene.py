"""One clause, tried on one client: the gateway that it talks to, and what it says."""

import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import anyio
import attrs

from adp_client.protocol.codec import OPCODES, encode_body
from adp_client.protocol.constants import NAMESPACE_BYTES, ErrorCode, Flag, Opcode
from adp_client.protocol.events import HelloReceived, RequestReceived
from adp_client.protocol.messages import Goodbye, Reply, Welcome
from adp_client.testing.gateway import MemoryGateway, Session
from adp_client.transport.base import Transport
from adp_client.transport.endpoints import TCPEndpoint

from .clause import Broken, expect, shown
from .frames import frame

T = TypeVar("T")

#: How long the gateway waits for what must not come, and how late it is when it is late.
QUIET_SECONDS = 0.1
_POLL_SECONDS = 0.005
_NOWHERE = TCPEndpoint(host="conformance.test", port=7171)


class ClientUnderTest(Protocol):
    """What a client must be able to do to be tried. A foreign one is adapted to this.

    Statuses are ErrorCode values, 0 for OK, one for each key in the order of the keys. Errors are
    exceptions, whichever; a client may always fail, as far as the contract goes, but it may not be wrong.
    """

    async def exist(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        """EXIST; statuses. Has a deadline, and gives up its connection when that passes."""
        ...

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], capacities: Sequence[int]
    ) -> Sequence[bytes | None]:
        """READ, with room for `capacities[i]` bytes of object i; None for one that did not come."""
        ...

    async def write(self, namespace: bytes, keys: Sequence[bytes], objects: Sequence[bytes]) -> Sequence[int]:
        """WRITE; statuses."""
        ...

    async def delete(self, namespace: bytes, keys: Sequence[bytes]) -> Sequence[int]:
        """DELETE; statuses."""
        ...

    async def fence(self) -> None:
        """FENCE; returns when it is answered."""
        ...


Dial = Callable[[], Awaitable[Transport]]

#: To enter: a client that makes its connections with `dial`. To leave: it says GOODBYE and is gone.
RunClient = Callable[[Dial], AbstractAsyncContextManager[ClientUnderTest]]


class Part(Session):
    """A connection of the gateway in a scene. Right, unless the clause says otherwise."""

    def __init__(self, gateway: MemoryGateway, transport: Transport) -> None:
        super().__init__(gateway, transport)
        self.was_early = False  # the client said something between HELLO and WELCOME

    @property
    def is_first(self) -> bool:
        """Whether this is the connection that the client made first."""
        return self.gateway.sessions[0] is self

    async def say(
        self,
        event: RequestReceived,
        reply: Reply,
        payload: bytes = b"",
        *,
        is_final: bool = True,
        request_id: int | None = None,
        opcode: int | None = None,
        **fields: Any,
    ) -> None:
        """A reply that need not be right: nothing is checked on this side."""
        raw = frame(
            OPCODES[type(event.message)] if opcode is None else opcode,
            encode_body(reply),
            request_id=event.request_id if request_id is None else request_id,
            flags=Flag.REPLY if is_final else Flag.REPLY | Flag.MORE,
            payload_bytes=len(payload),
            **fields,
        )
        await self.transport.send([raw, payload])

    async def say_welcome(self, welcome: Welcome) -> None:
        """A WELCOME that need not be right. What the client asks behind it is taken all the same."""
        self.connection.accept(attrs.evolve(welcome, version=1))
        raw = frame(Opcode.HELLO, encode_body(welcome), request_id=0, flags=Flag.REPLY)
        await self.transport.send([raw])


class SlowToGreet(Part):
    """Waits before WELCOME, and notes whether anything comes meanwhile."""

    async def greet(self, event: HelloReceived) -> None:
        """See Session."""
        self.was_early = self.connection.is_mid_frame  # it came together with HELLO
        with anyio.move_on_after(QUIET_SECONDS):
            count = await self.transport.receive_some(self.connection.receive_buffers())
            self.connection.bytes_received(count)
            self.was_early |= count > 0
        await super().greet(event)


class Scene:
    """Handed to a clause's function."""

    def __init__(self, run_client: RunClient) -> None:
        self.namespace = os.urandom(NAMESPACE_BYTES)
        self.awaits = "the client to be ready"
        self._run_client = run_client

    @asynccontextmanager
    async def play(
        self, *, session_type: type[Session] = Part, may_violate: bool = False, **settings: Any
    ) -> AsyncGenerator[tuple[ClientUnderTest, MemoryGateway]]:
        """A gateway (`settings` are MemoryGateway's) and the client under test. After: the client has left,
        and has not broken the protocol."""
        async with MemoryGateway(**settings) as gateway:
            gateway.session_type = session_type

            async def dial() -> Transport:
                return await gateway.dial(_NOWHERE)

            async with self._run_client(dial) as client:
                yield client, gateway
                self.awaits = "the client to leave"
            if gateway.violations and not may_violate:
                violation = gateway.violations[0]
                raise Broken(
                    f"expected a client that keeps the protocol, got {violation.code.name}: {violation}"
                )

    def keys(self, count: int) -> list[bytes]:
        """Different keys."""
        return [b"key %12d" % number for number in range(count)]

    async def attempt(self, what: str, call: Awaitable[T]) -> T | None:
        """What the client's verb returns; None if it raises: clauses judge what is said, not how it fails."""
        self.awaits = f"{what} to return or to raise"
        try:
            return await call
        except Exception:
            return None

    async def together(self, what: str, calls: Sequence[Awaitable[T]]) -> list[T | None]:
        """The same for several verbs at once."""
        found: list[T | None] = [None] * len(calls)

        async def one(at: int, call: Awaitable[T]) -> None:
            found[at] = await self.attempt(what, call)

        async with anyio.create_task_group() as tasks:
            for at, call in enumerate(calls):
                tasks.start_soon(one, at, call)
        return found

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for it; the clause's deadline ends it."""
        self.awaits = what
        while not condition():  # noqa: ASYNC110 - clients give no events
            await anyio.sleep(_POLL_SECONDS)

    async def until_over(self, session: Session) -> None:
        """Wait until the client has given up this connection."""
        await self.until("the client to end the connection", lambda: session.is_over)


def requests_of(gateway: MemoryGateway, kind: type) -> list[RequestReceived]:
    """What was asked of this kind, on whichever connection."""
    return [
        request
        for session in gateway.sessions
        for request in session.requests
        if isinstance(request.message, kind)
    ]


def asked(session: Session) -> list[str]:
    """The names of what was asked, but for GOODBYE."""
    return [
        type(request.message).__name__.upper()
        for request in session.requests
        if not isinstance(request.message, Goodbye)
    ]


def expect_true_or_error(subject: str, right: Sequence[object], found: Sequence[object] | None) -> None:
    """The client may fail; what it says must be right."""
    if found is None:
        return
    try:
        got = list(found)
    except TypeError:
        raise Broken(f"{subject}: expected {shown(list(right))} or an error, got {_strange(found)}") from None
    if got != list(right):
        raise Broken(f"{subject}: expected {shown(list(right))} or an error, got {shown(got)}")


def expect_statuses(subject: str, right: Sequence[ErrorCode], found: Sequence[int] | None) -> None:
    """The client must not fail here."""
    if found is None:
        raise Broken(f"{subject}: expected {shown(list(right))}, got an error")
    try:
        got = [ErrorCode(each) for each in found]
    except (TypeError, ValueError):
        raise Broken(f"{subject}: expected {shown(list(right))}, got {_strange(found)}") from None
    expect(subject, list(right), got)


def _strange(found: object) -> str:
    """What should have been a sequence of statuses, or of objects."""
    return f"{type(found).__name__} {shown(found)}"
