"""The steps of a case over real connections, and the bystander that must not notice any of it."""

import contextlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc
import attrs
import xxhash

from adp_client.protocol import ErrorCode, Feature
from adp_client.protocol.messages import Exist, Hello, Ping, Read, Release, Request, Welcome, Write, WriteItem
from adp_client.transport import Endpoint, SocketTransport, TLSConfig, connect

from .cases import Case, Step
from .model import Finding, Model
from .spelling import frame, with_token
from .watch import Watch

_RECEIVE_BYTES = 1 << 16


class GatewayLeaves(Exception):
    """The gateway says that it goes away: no finding, but the end."""


@attrs.define
class Tally:
    """What a run has done so far."""

    sequences: int = 0
    connections: int = 0
    sent_bytes: int = 0
    violations: int = 0
    errors: dict[str, int] = attrs.field(factory=dict)  # ERROR frames, by their code
    statuses: dict[str, int] = attrs.field(factory=dict)  # of items
    other_codes: int = 0  # violations that ended in another code than this project's core has for them

    def count(self, watch: Watch) -> None:
        """A connection is over."""
        if watch.violation is not None and watch.is_certain:
            self.violations += 1
        if watch.error is not None:
            name = watch.error.code.name
            self.errors[name] = self.errors.get(name, 0) + 1
            self.other_codes += watch.violation is not None and watch.violation.code is not watch.error.code
        for status in watch.statuses:
            name = ErrorCode(status).name
            self.statuses[name] = self.statuses.get(name, 0) + 1
        watch.statuses.clear()


@attrs.frozen(kw_only=True)
class Gateway:
    """What is fuzzed."""

    endpoint: Endpoint
    deadline: float  # seconds, for any answer
    token: bytes = b""
    tls: TLSConfig | None = None


class Link:
    """A connection, its watch, and the task that listens."""

    def __init__(self, transport: SocketTransport, watch: Watch, gateway: Gateway) -> None:
        self.transport = transport
        self.watch = watch
        self.is_refusable = False  # ERROR instead of WELCOME is right
        self.is_over = False  # the gateway's bytes have ended
        self._gateway = gateway
        self._is_ours = False  # we have ended it
        self._finding: Finding | GatewayLeaves | None = None
        self._changed = anyio.Event()

    async def listen(self) -> None:
        """Until the end of the stream."""
        buffer, how = memoryview(bytearray(_RECEIVE_BYTES)), ""
        try:
            while count := await self.transport.receive_some([buffer]):
                self.watch.received(buffer[:count])
                if self.watch.is_draining:
                    self._finding = GatewayLeaves("the gateway is going away")
                self._tell()
            how = "closed"
        except OSError as exc:
            how = f"broken: {exc}"
        except Finding as exc:
            self._finding = self._finding or exc
        if self._finding is None:
            self._judge_end(how)
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _judge_end(self, how: str) -> None:
        watch = self.watch
        if self._is_ours or watch.is_left or watch.violation is not None or watch.is_early:
            return
        code = None if watch.error is None else watch.error.code
        if code is ErrorCode.SHUTTING_DOWN:
            self._finding = GatewayLeaves("the gateway is going away")
            return
        if watch.welcome is None and self.is_refusable:
            return
        if code is ErrorCode.TIMED_OUT and watch.is_owing:
            return
        said = "without a word" if watch.error is None else f"with {watch.error}"
        self._finding = Finding(f"the gateway ended a connection that was in order, {said} ({how})")

    def raise_finding(self) -> None:
        """What the listener found."""
        if self._finding is not None:
            raise self._finding

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait; Finding if it takes longer than the deadline, or the listener found something."""
        # A DELETE waits for the leases on what it names, also for those that others have.
        seconds = self._gateway.deadline + self.watch.lease_seconds_left
        with anyio.move_on_after(seconds) as scope:
            while self._finding is None and not condition():
                await self._changed.wait()
        self.raise_finding()
        if scope.cancelled_caught:
            raise Finding(
                f"no {what} in {seconds:g} s; expected: {self.watch.expected}",
                is_old=True,
            )

    async def send(self, data: bytes) -> None:
        """Tell the watch, then the gateway."""
        self.watch.sent(data)
        try:
            with anyio.fail_after(self._gateway.deadline):
                await self.transport.send([data])
        except TimeoutError:
            if self.is_over:
                return
            raise Finding(
                f"the gateway takes no bytes for {self._gateway.deadline:g} s", is_old=True
            ) from None
        except OSError:
            await self.until(lambda: self.is_over, "end of a connection that takes no bytes")

    async def settled(self) -> None:
        """Wait for all answers."""
        watch = self.watch
        await self.until(
            lambda: watch.is_answered or watch.violation is not None or self.is_over, "final answer"
        )

    async def finish(self) -> None:
        """Whatever is owed must come; then end it."""
        watch = self.watch
        if watch.is_greeted and watch.violation is None and not watch.is_left:
            await self.until(
                lambda: watch.welcome is not None or watch.error is not None or self.is_over, "WELCOME"
            )
        if watch.violation is None and not watch.is_left:
            if watch.error is None and not self.is_over:
                await self.settled()
        elif watch.is_certain:
            await self.until(
                lambda: watch.error is not None or watch.is_left or self.is_over, "end after that"
            )
        if watch.error is not None or watch.is_left:
            with contextlib.suppress(OSError):
                self.transport.raw_socket.shutdown(socket.SHUT_WR)
            await self.until(lambda: self.is_over, "end of the stream")
        self.raise_finding()
        await self.close()

    async def close(self, *, is_reset: bool = False) -> None:
        """End it from here."""
        self._is_ours = True
        self.watch.ended()
        if is_reset:
            with contextlib.suppress(OSError):
                self.transport.raw_socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
        await self.transport.aclose()


async def dial(gateway: Gateway, model: Model, tasks: anyio.abc.TaskGroup) -> Link:
    """A connection on which nothing has been said. Raises Finding if there is none."""
    try:
        with anyio.fail_after(gateway.deadline):
            transport = await connect(gateway.endpoint, tls=gateway.tls)
    except (OSError, TimeoutError) as exc:
        raise Finding(f"cannot connect to {gateway.endpoint}: {exc or 'no answer'}", is_old=True) from None
    link = Link(transport, Watch(model), gateway)
    tasks.start_soon(link.listen)
    return link


class Sequence:
    """One case under way."""

    def __init__(self, case: Case, gateway: Gateway, tally: Tally, boot_id: bytes) -> None:
        self.case = case
        self.expected: list[str] = []  # after each step
        self.is_at_fault = False
        self._gateway = gateway
        self._tally = tally
        self._boot_id = boot_id
        self._model = Model()
        self._links: dict[int, Link] = {}

    async def run(self) -> None:
        """All steps. Raises Finding."""
        async with anyio.create_task_group() as tasks:
            try:
                for step in self.case.steps:
                    await self._take(step, tasks)
                    link = self._links.get(step.connection)
                    self.expected.append("" if link is None else link.watch.expected)
                for link in self._links.values():
                    await link.finish()
            except Finding as exc:
                self.is_at_fault = not exc.is_old
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    for link in self._links.values():
                        await link.close()
                        self._tally.count(link.watch)
        self._tally.sequences += 1

    async def _take(self, step: Step, tasks: anyio.abc.TaskGroup) -> None:
        if step.do == "dial":
            await self._dial(step, tasks)
            return
        link = self._links.get(step.connection)
        if link is None:
            return
        match step.do:
            case "send":
                await self._send(link, step)
            case "settle":
                await link.settled()
            case "silence":
                await anyio.sleep(step.pause_ms / 1000)
                link.raise_finding()
            case "release":
                await self._release(link, step)
            case "drop":
                del self._links[step.connection]
                await link.close(is_reset=step.how == "reset")
                self._tally.count(link.watch)

    async def _dial(self, step: Step, tasks: anyio.abc.TaskGroup) -> None:
        link = self._links[step.connection] = await dial(self._gateway, self._model, tasks)
        self._tally.connections += 1
        watch = link.watch
        link.is_refusable = step.how != "welcome"
        await self._send(link, attrs.evolve(step, data=with_token(step.data, self._gateway.token)))
        if step.how == "welcome":
            await link.until(lambda: watch.welcome is not None, "WELCOME")
            assert watch.welcome is not None
            if watch.welcome.boot_id != self._boot_id:
                raise Finding("the gateway has another boot id: it was restarted, or died", is_old=True)
        elif step.how == "refusal":
            await link.until(
                lambda: watch.welcome is not None or watch.error is not None or link.is_over, "ERROR"
            )
            if watch.welcome is not None:
                raise Finding("the gateway welcomes a HELLO that it must refuse")

    async def _send(self, link: Link, step: Step) -> None:
        at = 0
        for size in (*step.pieces, len(step.data)):
            piece = step.data[at : at + size]
            if not piece or link.is_over:
                break
            self._tally.sent_bytes += len(piece)
            await link.send(piece)
            at += size
            if step.pause_ms and at < len(step.data):
                await anyio.sleep(step.pause_ms / 1000)
        link.raise_finding()

    async def _release(self, link: Link, step: Step) -> None:
        lease_ids = tuple(link.watch.lease_ids)
        if lease_ids and not link.is_over:
            link.watch.releasing(lease_ids)
            await link.send(frame(Release(lease_ids=lease_ids), step.request_id))


class Bystander:
    """A client that behaves, all the while. It must get right answers, and soon."""

    def __init__(self, gateway: Gateway, namespace: bytes) -> None:
        self.rounds = 0
        self.worst_seconds = 0.0
        self._gateway = gateway
        self._namespace = namespace
        self._model = Model()
        self._rng = random.Random(namespace)
        self._next_id = 0

    async def run(self, turn: Callable[[], Awaitable[None]]) -> None:
        """Round after round; `turn` is awaited between two. Raises Finding."""
        async with anyio.create_task_group() as tasks:
            link = await dial(self._gateway, self._model, tasks)
            try:
                await link.send(frame(Hello(token=self._gateway.token, agent="fuzz bystander"), 0))
                await link.until(lambda: link.watch.welcome is not None, "WELCOME for a client that behaves")
                while True:
                    await self._round(link)
                    self.rounds += 1
                    await turn()
            except Finding as exc:
                raise Finding(f"beside the sequences: {exc}") from None
            finally:
                with anyio.CancelScope(shield=True):
                    await link.close()

    async def _round(self, link: Link) -> None:
        keys = tuple(b"bystander-%02d" % self._rng.randrange(20) for _ in range(3))
        data = [self._rng.randbytes(self._rng.choice((10, 5000, 20000))) for _ in keys]
        items = tuple(
            WriteItem(object_bytes=len(d), length=len(d), checksum=xxhash.xxh3_64_intdigest(d)) for d in data
        )
        await self._ask(link, Write(namespace=self._namespace, keys=keys, items=items), b"".join(data))
        await self._ask(link, Read(namespace=self._namespace, keys=keys, capacities=(20000,) * len(keys)))
        await self._ask(link, Exist(namespace=self._namespace, keys=keys))
        await self._ask(link, Ping(nonce=self.rounds))
        link.watch.statuses.clear()
        self._forget()

    async def _ask(self, link: Link, message: Request, payload: bytes = b"") -> None:
        self._next_id += 1
        began = time.monotonic()
        await link.send(frame(message, self._next_id, payload=payload))
        await link.settled()
        self.worst_seconds = max(self.worst_seconds, time.monotonic() - began)

    def _forget(self) -> None:
        """Versions that are certainly replaced: the run may be long."""
        for versions in self._model.versions.values():
            stored = [version for version in versions if version.is_stored]
            versions[:] = stored[-2:]


async def greet(gateway: Gateway) -> Welcome:
    """What the gateway announces. Raises Finding if it does not answer."""
    async with anyio.create_task_group() as tasks:
        link = await dial(gateway, Model(), tasks)
        try:
            hello = Hello(features=~Feature.NONE, token=gateway.token, agent="fuzz")
            await link.send(frame(hello, 0))
            await link.until(lambda: link.watch.welcome is not None, "WELCOME")
        finally:
            with anyio.CancelScope(shield=True):
                await link.close()
    assert link.watch.welcome is not None
    return link.watch.welcome
