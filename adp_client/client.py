"""The client: verbs over vectors of keys, on asyncio and on trio.

    async with Client(ClientConfig(endpoint="unix:///run/adp/gateway.sock")) as client:
        found = await client.exist(namespace, keys)

Entering returns at once; the connection is made in the background and made again whenever it breaks. A verb
waits for it within its own time. Batches may have any size: they are cut by the limits that the gateway has
announced, and the results put together again. Objects have any size too, up to the gateway's largest: above
what its device takes at once they are cut, by the gateway or, if it says that it does not, here
(`fragmenting`); either way an object is whole or absent.

A gateway may have several workers, each with a part of the objects. Its client has a connection to each, cuts
every call accordingly and puts the answers together (`routing`). While one is gone and others can be reached,
what it keeps is NOT_FOUND, and a WRITE of it GATEWAY_FAULT; a DELETE of it waits, or raises.

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
from .link import Dialer, Link
from .ordering import Call, Order
from .protocol.errors import (
    ConfigError,
    LinkClosed,
    LocalProtocolError,
)
from .protocol.keys import check_namespace
from .regions import RegionSlice
from .results import CheckResult, DeleteResult, ExistResult, GatewayInfo, ReadResult, WriteResult
from .routing import Router
from .stats import ClientStats
from .transport.dialling import connect


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
        self._router: Router | None = None
        self._order = Order()

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
        error: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                self._router = Router(
                    self.config,
                    dial=self._dial,
                    stats=self._stats,
                    source=self._source,
                    order=self._order,
                    tasks=tasks,
                )
                try:
                    yield
                except Exception as exc:
                    error = exc
                finally:
                    await self._router.leave()
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
        """Whether a request could go out now: with several workers, to any of them."""
        return self._router is not None and self._router.is_reachable()

    @property
    def gateway(self) -> GatewayInfo | None:
        """The gateway as it introduced itself last; None before the first handshake."""
        links = () if self._router is None else [lane.link for lane in self._router.lanes]
        return next((link.gateway for link in links if link.gateway is not None), None)

    @property
    def _link(self) -> Link | None:
        """The one to the gateway, or to its first worker."""
        return None if self._router is None else self._router.lanes[0].link

    def stats(self) -> ClientStats:
        """A copy of the counters."""
        return attrs.evolve(self._stats)

    async def wait_connected(self) -> GatewayInfo:
        """Wait until the handshake is done, with each of several workers that can be reached; what the
        gateway says of itself.

        Raises ConnectFailed after `Timeouts.request_seconds`, or at once if the gateway refuses this client;
        LinkClosed. Cancellation changes nothing: the client goes on dialling.
        """
        await self._here().wait_connected(self._deadline())
        gateway = self.gateway
        assert gateway is not None
        return gateway

    def _here(self) -> Router:
        if self._router is None:
            raise RuntimeError("use the client inside `async with Client(...) as client`")
        if self._home != (os.getpid(), threading.get_ident()):
            raise RuntimeError(
                "this Client belongs to the thread and process that entered it; "
                "make one for each event loop (and after fork, in the child)"
            )
        if self._router.is_closing:
            raise LinkClosed("the client is closed")
        return self._router

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
            router = self._here()
            if lease_seconds is None:
                return ExistResult(statuses=await router.exist(namespace, keys, call))
            statuses, lease = await router.exist_leased(namespace, keys, lease_seconds, call)
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
            statuses, lengths = await self._here().read(
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
            return WriteResult(statuses=await self._here().write(namespace, keys, payloads, call))

    async def delete(self, namespace: bytes, keys: Sequence[bytes]) -> DeleteResult:
        """Remove objects, each after every outstanding read of it: OK, or NOT_FOUND if it was not there.

        A leased object stays until its leases have ended, yours included; this waits for them.

        Raises what the module lists; LinkLost if the connection breaks after it was sent: a DELETE is never
        sent twice, and `LinkLost.maybe_applied` says that it, or a part of it at another worker, may have
        been done. Cancelled: it may be done.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        with await self._begin() as call:
            return DeleteResult(statuses=await self._here().delete(namespace, keys, call))

    async def check(self, namespace: bytes, keys: Sequence[bytes]) -> CheckResult:
        """Have the gateway verify objects on its device: OK, NOT_FOUND, or CORRUPT, and then it drops them.

        Raises what the module lists. Cancelled: the gateway may go on with it, which does no harm.
        """
        namespace, keys = check_namespace(namespace), check_keys(keys)
        with await self._begin() as call:
            return CheckResult(statuses=await self._here().check(namespace, keys, call))

    async def fence(self) -> None:
        """Return when everything that was asked before is done. Nothing asked later starts before that.

        Raises what the module lists; LinkLost if the connection breaks: a FENCE is never sent twice.
        Cancelled: it stands all the same, and holds up what was asked behind it.
        """
        await self._here().fence(self._deadline())

    async def ping(self) -> float:
        """Ask the gateway for a sign of life; how many seconds it took, waiting for a connection included.

        Raises what the module lists; LinkLost if the connection breaks. Cancellation leaves nothing behind.
        """
        begun = anyio.current_time()
        with await self._begin() as call:
            await self._here().ping(self._stats.requests, call)
        return anyio.current_time() - begun

    # ------------------------------------------------------------ how a verb runs

    def _deadline(self, seconds: float | None = None) -> float:
        return anyio.current_time() + (self.config.timeouts.request_seconds if seconds is None else seconds)

    async def _begin(self, seconds: float | None = None) -> Call:
        """A call that has `request_seconds` unless told otherwise: from here, so that waiting for a
        connection, queueing and replays all count."""
        self._here()
        return await self._order.begin(self._deadline(seconds))


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
