"""The client: verbs over vectors of keys, on asyncio and on trio.

    async with Client(ClientConfig(endpoint="unix:///run/adp/gateway.sock")) as client:
        found = await client.exist(namespace, keys)

Entering returns at once; the connection is made in the background and made again whenever it breaks. A verb
waits for it within its own time. Batches may have any size: they are cut by the limits that the gateway has
announced, and the results put together again. Objects have any size too, up to the gateway's largest: above
what its device takes at once they are cut, by the gateway or, if it says that it does not, here
(`fragmenting`); either way an object is whole or absent.

Your memory: from the moment a verb returns or raises, cancellation included, the buffers that it was given
are yours; nobody reads or writes them any more, and nobody keeps a view of them (a `bytearray` can be
resized). A cancelled READ or WRITE may take up to `Timeouts.release_seconds` to raise, if a transfer is
inside that memory; then the connection is cut instead.
A READ into a `SharedRegion` may take as long again until the gateway has let go of it; if it does not, that
region is retired (`SharedRegion.is_retired`).

Names and sizes: a namespace has 32 bytes; a vector has any number of keys of 1 to 128 bytes each, item i of
every other argument and of the result belongs to `keys[i]`, and an empty vector is answered at once. Sizes
are bytes, times are seconds.

Every verb raises, beside what its own text names:

* `ConnectFailed`: there was no connection within the verb's time, or the gateway refuses this client.
* `LinkLost`: the connection ended and the verb is not one to be sent twice, or has been sent too often.
* `LinkClosed`: the client has been closed. `RequestTimeout`: no answer in `Timeouts.request_seconds`.
* a `RequestError` (`Overloaded`, `Refused`, ...): the gateway refused the whole of it; no item of it is done.
* `LocalProtocolError`: the arguments are wrong, and nothing has been asked.
* RuntimeError: the client belongs to another thread or process, or has not been entered.

What the gateway says of single items is a value, never an exception: see the results.
"""

import functools
import math
import os
import random
import threading
from collections import deque
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import NoReturn, Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs
from typing_extensions import Buffer

from .batches import check_keys
from .config import ClientConfig
from .epoch import Epoch
from .fragmenting import Fragmenting
from .fragments import Way
from .link import Dialer, Link
from .operations import (
    INLINE_HASH_BYTES,
    UNSETTLED,
    ControlOperation,
    GatewayChanged,
    Operation,
    SimpleOperation,
    VectorOperation,
    WriteOperation,
)
from .ordering import Call, Order
from .pending import Outcome, Pending
from .protocol.errors import (
    ConfigError,
    LinkClosed,
    LinkError,
    LinkLost,
    LocalProtocolError,
    RequestError,
    RequestTimeout,
    request_error,
)
from .protocol.keys import check_namespace
from .protocol.messages import Check, Fence, Ping
from .regions import RegionSlice
from .replay import Fate, fate
from .results import CheckResult, DeleteResult, ExistResult, GatewayInfo, ReadResult, WriteResult
from .sharing import RegionRead, RegionWrite
from .stats import ClientStats
from .transport.dialling import connect

MAX_UNREPORTED = 1024  # corrupt objects that wait to be reported
HASH_THREADS = (
    2  # that hash what is to be written: more would only take cores, and the interpreter, from reads
)


class Client:
    """One gateway. See the module; `dial` and `source` are for tests.

    Belongs to the event loop, thread and process that entered it: any other use raises RuntimeError.
    """

    def __init__(
        self, config: ClientConfig, *, dial: Dialer | None = None, source: random.Random | None = None
    ) -> None:
        problems = [*config.problems(), *(config.tls.problems() if config.tls is not None else ())]
        if problems:
            raise ConfigError(tuple(problems))
        self.config = config
        self._stats = ClientStats()
        self._dial = functools.partial(connect, tls=config.tls) if dial is None else dial
        self._source = random.Random() if source is None else source
        self._home: tuple[int, int] | None = None
        self._link: Link | None = None
        self._damaged: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_UNREPORTED)
        self._damage = anyio.Event()
        self._order = Order()
        self._hashing = anyio.CapacityLimiter(HASH_THREADS)
        self._fragmenting = Fragmenting(
            perform=self._perform,
            find_way=self._find_way,
            note_damage=self._note_damage,
            hashing=self._hashing,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Client cannot be sent to another process: make one there")

    # ------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        if self._home is not None:
            raise RuntimeError("a Client can be entered once")
        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> bool | None:
        return await self._life.__aexit__(*exc_info)  # type: ignore[arg-type]

    @asynccontextmanager
    async def _live(self) -> AsyncGenerator[None]:
        """A task group wraps every exception in a group. The body's own error is therefore kept out of it,
        and a lone bug of a background task is unwrapped: `except` clauses see what was raised."""
        self._home = (os.getpid(), threading.get_ident())
        self._link = Link(self.config, dial=self._dial, stats=self._stats, source=self._source)
        error: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._link.run)
                tasks.start_soon(self._report_damage)
                try:
                    yield
                except Exception as exc:
                    error = exc
                finally:
                    await self._link.leave()
                    tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            if error is not None:
                raise BaseExceptionGroup("the body and the client", [error, *group.exceptions]) from None
            (first, *others) = group.exceptions
            if others:
                raise
            raise first from None
        if error is not None:
            raise error

    @property
    def is_connected(self) -> bool:
        """Whether a request could go out now."""
        return self._link is not None and self._link.epoch is not None

    @property
    def gateway(self) -> GatewayInfo | None:
        """The gateway as it introduced itself last; None before the first handshake."""
        return None if self._link is None else self._link.gateway

    def stats(self) -> ClientStats:
        """A copy of the counters."""
        return attrs.evolve(self._stats)

    async def wait_connected(self) -> GatewayInfo:
        """Wait until the handshake is done; what the gateway says of itself.

        Raises ConnectFailed after `Timeouts.request_seconds`, or at once if the gateway refuses this client;
        LinkClosed. Cancellation changes nothing: the client goes on dialling.
        """
        link = self._here()
        await link.wait_open(anyio.current_time() + self.config.timeouts.request_seconds)
        assert link.gateway is not None
        return link.gateway

    def _here(self) -> Link:
        if self._link is None:
            raise RuntimeError("use the client inside `async with Client(...) as client`")
        if self._home != (os.getpid(), threading.get_ident()):
            raise RuntimeError(
                "this Client belongs to the thread and process that entered it; "
                "make one for each event loop (and after fork, in the child)"
            )
        if self._link.is_closing:
            raise LinkClosed("the client is closed")
        return self._link

    # ------------------------------------------------------------ verbs

    async def exist(
        self, namespace: bytes, keys: Sequence[bytes], *, lease_seconds: float | None = None
    ) -> ExistResult:
        """Which objects are there: OK or NOT_FOUND for each key. No promise, unless it is leased.

        With `lease_seconds` they are also to stay there so long, or as long as the gateway grants; see
        `ExistResult.lease`, which is None if nothing was found or nothing was granted.

        Raises RequestTimeout after `Timeouts.exist_seconds`; the connection is given up then and opened anew.
        A connection that breaks is no error here: the question is asked again. A call that raises,
        cancellation included, leaves no lease behind.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        if lease_seconds is not None:
            _check_lease(lease_seconds)
        with await self._begin(self.config.timeouts.exist_seconds) as call:
            if lease_seconds is None:
                return ExistResult(statuses=await self._fragmenting.exist(namespace, keys, call))
            statuses, lease = await self._fragmenting.exist_leased(namespace, keys, lease_seconds, call)
            return ExistResult(statuses=statuses, lease=lease)

    async def read(
        self, namespace: bytes, keys: Sequence[bytes], buffers: Sequence[Buffer | RegionSlice]
    ) -> ReadResult:
        """Read object i into `buffers[i]` (writable, contiguous, apart; a larger one gets a prefix).

        Slices of a `SharedRegion` are filled by the gateway itself, if all are such and it can.

        OK: `lengths[i]` bytes of buffer i are the object, checked against its writer's checksum. NOT_FOUND: a
        miss. TOO_LARGE: the object is larger than its buffer. CORRUPT: its bytes do not match their checksum;
        the gateway is told, and drops it. After any of these but OK the content of buffer i is undefined.

        Raises what the module lists; a connection that breaks is no error, what is missing is asked for
        again. Cancelled, or with any error: the content of all buffers is undefined, and they are yours.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        _same_count(keys, buffers)
        with await self._begin() as call:
            statuses, lengths = await self._fragmenting.read(
                namespace, keys, buffers, call, is_verified=self.config.verify_payloads
            )
        return ReadResult(statuses=statuses, lengths=lengths)

    async def write(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        payloads: Sequence[Buffer | RegionSlice | Sequence[Buffer | RegionSlice]],
    ) -> WriteResult:
        """Store object i from `payloads[i]`: one buffer, or a list of buffers to send end to end.

        Slices of a `SharedRegion` are fetched by the gateway itself, if each payload is one and it can.

        OK: stored, and visible to every READ from now on; what was there under the key is replaced in one
        step. TOO_LARGE: above what this gateway keeps. CAPACITY_EXHAUSTED, OVERLOADED: not stored. CORRUPT:
        the bytes changed on the way, or while they were being sent; not stored.

        Raises what the module lists; a connection that breaks is no error, the rest is sent again (a key
        names contents: writing twice is writing once). Cancelled, or with any error: each object is as it
        was before or stored as a whole, and the buffers are yours.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        _same_count(keys, payloads)
        with await self._begin() as call:
            return WriteResult(statuses=await self._fragmenting.write(namespace, keys, payloads, call))

    async def delete(self, namespace: bytes, keys: Sequence[bytes]) -> DeleteResult:
        """Remove objects, each after every outstanding read of it: OK, or NOT_FOUND if it was not there.

        A leased object stays until its leases have ended, yours included; this waits for them.

        Raises what the module lists; LinkLost if the connection breaks after it was sent: a DELETE is never
        sent twice, and `LinkLost.maybe_applied` says that it may have been done. Cancelled: it may be done.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        with await self._begin() as call:
            return DeleteResult(statuses=await self._fragmenting.delete(namespace, keys, call))

    async def check(self, namespace: bytes, keys: Sequence[bytes]) -> CheckResult:
        """Have the gateway verify objects on its device: OK, NOT_FOUND, or CORRUPT, and then it drops them.

        Raises what the module lists. Cancelled: the gateway may go on with it, which does no harm.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        with await self._begin() as call:
            return CheckResult(statuses=await self._fragmenting.check(namespace, keys, call))

    async def fence(self) -> None:
        """Return when everything that was asked before is done. Nothing asked later starts before that.

        Raises what the module lists; LinkLost if the connection breaks: a FENCE is never sent twice.
        Cancelled: it stands all the same, and holds up what was asked behind it.
        """
        self._here()
        async with self._order.fence(self._deadline()) as call:
            await self._perform(ControlOperation(Fence()), call)

    async def ping(self) -> float:
        """Ask the gateway for a sign of life; how many seconds it took, waiting for a connection included.

        Raises what the module lists; LinkLost if the connection breaks. Cancellation leaves nothing behind.
        """
        begun = anyio.current_time()
        with await self._begin() as call:
            await self._perform(ControlOperation(Ping(nonce=self._stats.requests)), call)
        return anyio.current_time() - begun

    # ------------------------------------------------------------ how a verb runs

    def _deadline(self, seconds: float | None = None) -> float:
        return anyio.current_time() + (self.config.timeouts.request_seconds if seconds is None else seconds)

    async def _begin(self, seconds: float | None = None) -> Call:
        """A call that has `request_seconds` unless told otherwise: from here, so that waiting for a
        connection, queueing and replays all count."""
        self._here()
        return await self._order.begin(self._deadline(seconds))

    async def _find_way(self, call: Call) -> Way:
        """How objects are stored at the gateway that is there, or will be. Where the client cuts, and where
        that is not known yet, `call` may take several requests."""
        link = self._here()
        if link.epoch is None:
            call.hold()
        way = (await link.wait_open(call.deadline)).way
        if not way.cuts_itself:
            call.hold()
        return way

    async def _perform(self, operation: SimpleOperation | WriteOperation, call: Call) -> None:
        """Drive `operation` to its end, within the time of `call`."""
        try:
            link = self._here()
            await anyio.lowlevel.checkpoint()
            while UNSETTLED in operation.statuses:
                epoch = await link.wait_open(call.deadline)
                if operation.way is not None and not operation.way.holds_at(epoch.way):
                    raise GatewayChanged
                requests: list[Pending] = []
                try:
                    await self._submit(operation, epoch, requests, call.deadline)
                    while operation.pending_count:
                        await operation.changed()
                        await operation.examine()
                    await operation.examine()  # what came while it was looking
                    await epoch.let_go(operation)
                except BaseException:
                    await epoch.abandon(operation)
                    raise
                self._judge(operation, requests, epoch, call)
        finally:
            operation.let_go()

    async def _submit(
        self,
        operation: SimpleOperation | WriteOperation,
        epoch: Epoch,
        requests: list[Pending],
        deadline: float,
    ) -> None:
        limits = epoch.limits
        operation.begin(epoch)
        if isinstance(operation, (RegionRead, RegionWrite)):
            await epoch.share(operation, deadline)
        if isinstance(operation, SimpleOperation):
            for pending in operation.requests(limits):
                pending.deadline = deadline
                requests.append(pending)
                epoch.submit(pending)
            return
        operation.refuse_oversized(limits)
        for items in operation.batches(limits):
            # While this batch is hashed, the one before is on its way.
            if operation.unhashed_bytes(items) < INLINE_HASH_BYTES:
                operation.hash(items)
            else:
                await anyio.to_thread.run_sync(operation.hash, items, limiter=self._hashing)
            pending = operation.request(items, limits)
            pending.deadline = deadline
            requests.append(pending)
            epoch.submit(pending)

    def _judge(self, operation: Operation, requests: list[Pending], epoch: Epoch, call: Call) -> None:
        """Return if the call is answered or may be tried again; raise what the caller must know."""
        refused = [pending for pending in requests if pending.outcome is Outcome.REFUSED]
        if (
            refused
            and len(refused) == len(requests)
            and all(status == UNSETTLED for status in operation.statuses)
        ):
            raise request_error(refused[0].code, retry_after_ms=refused[0].retry_after_ms)
        for pending in refused:
            operation.refuse(pending)
        lost = [pending for pending in requests if pending.outcome is Outcome.LOST]
        for pending in requests:
            if pending.error is not None:
                raise pending.error
            if pending.outcome is Outcome.EXPIRED:
                raise RequestTimeout(f"no answer to {operation.verb.name} in time{operation.hazard}")
        if not lost:
            return
        reason = epoch.ending.reason if epoch.ending is not None else "the gateway is leaving"
        if self._link is None or self._link.is_closing:
            raise LinkClosed("the client was closed while the request was under way")
        was_sent = any(pending.was_sent for pending in lost)
        if operation.hazard:
            raise LinkLost(reason + operation.hazard, epoch=epoch.number, maybe_applied=was_sent)
        if fate(operation.verb, was_sent=was_sent, replays=call.replays) is Fate.FAIL:
            raise LinkLost(reason, epoch=epoch.number, maybe_applied=was_sent)
        call.replays += was_sent
        self._stats.replays += was_sent

    # ------------------------------------------------------------ damage

    def _note_damage(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._stats.objects_corrupt += 1
            self._stats.checks_dropped += len(self._damaged) == MAX_UNREPORTED
            self._damaged.append((namespace, key))
        self._damage.set()

    async def _report_damage(self) -> None:
        """Ask the gateway to look at objects that arrived damaged, so that it can drop them."""
        while True:
            await self._damage.wait()
            self._damage = anyio.Event()
            while self._damaged:
                namespace = self._damaged[0][0]
                keys: list[bytes] = []
                while self._damaged and self._damaged[0][0] == namespace:
                    keys.append(self._damaged.popleft()[1])
                try:
                    await self._perform(
                        VectorOperation(Check, namespace, tuple(keys)), Call(self._order, self._deadline())
                    )
                except (LinkError, RequestError, RequestTimeout):
                    self._stats.checks_dropped += len(keys)


def _same_count(keys: Sequence[bytes], memory: Sequence[object]) -> None:
    if not isinstance(memory, Collection) or isinstance(memory, (str, bytes, bytearray, memoryview)):
        raise LocalProtocolError(f"memory is given as a list of buffers, not as {type(memory).__name__}")
    if len(keys) != len(memory):
        raise LocalProtocolError(f"{len(keys)} keys and {len(memory)} buffers")


def _check_lease(seconds: object) -> None:
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise LocalProtocolError(f"a lease is a number of seconds, not {type(seconds).__name__}: {seconds!r}")
    if not 0 < seconds < math.inf:
        raise LocalProtocolError(f"a lease of {seconds} seconds")
