"""The lane to one gateway, or to one of its workers: dial, greet, live through an epoch, back off, again
(PRODUCT.md, W7).

One dial at a time, however many callers wait. This is the only place where errors of the operating system
become errors of the client.

A link has a route: which worker it believes to lead to, of which map; callers wait for a link on a route.
Whoever answers may tell another map; then the `Switchboard` is told, and all routes that held are over.
"""

import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
import attrs

from .backoff import Backoff
from .config import ClientConfig
from .epoch import LAST_WORDS_SECONDS, Epoch
from .operations import Rerouted
from .protocol.connection import Connection
from .protocol.constants import CRITICAL_EXTENSION, WORKERS_EXTENSION, ErrorCode, Feature, Role
from .protocol.errors import ConnectFailed, LinkClosed, LinkRefused, RemoteProtocolError
from .protocol.events import NoticeReceived, Opened, PeerClosed
from .protocol.messages import ErrorMessage, Hello, Welcome
from .protocol.workers import WorkerMap, decode_worker_map
from .results import GatewayInfo
from .stats import ClientStats
from .transport.base import Transport, local_transport
from .transport.endpoints import Endpoint, parse_endpoint
from .transport.trust import TLSFailure

Dialer = Callable[[Endpoint], Awaitable[Transport]]

#: How long callers wait for a worker that has just been lost, while they can reach others.
GRACE_SECONDS = 0.25
#: The same for one that has not been reached yet: everything else is starting, too.
FIRST_GRACE_SECONDS = 1.0

FEATURES = Feature.LEASES | Feature.FRAGMENTS | Feature.CREDITS
AGENT = "adp-client-python/0.1"
logger = logging.getLogger("adp_client")


@attrs.define(eq=False)
class Route:
    """Where a link leads: to a gateway that is one (`told` is None), or to a worker of it."""

    told: WorkerMap | None = None
    is_over: bool = False  # the gateway has other workers now


class Switchboard(Protocol):
    """Who knows all links of a client."""

    def is_reachable(self) -> bool:
        """Whether any worker can be asked."""
        ...

    def reroute(self, link: "Link", told: WorkerMap | None) -> None:
        """Whoever `link` has dialled tells another map. Gives it a new route. Raises ValueError for places
        that cannot be dialled."""
        ...

    def opened(self, link: "Link") -> None:
        """`link` takes requests."""
        ...


class Link:
    """See the module. `run` is its one task; everything else may be called by any task of the same loop."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        dial: Dialer,
        stats: ClientStats,
        source: random.Random,
        switchboard: Switchboard,
    ) -> None:
        self._config = config
        self._home = parse_endpoint(config.endpoint)
        self._endpoint = self._home
        self._switchboard = switchboard
        self._dial = dial
        self._stats = stats
        self._backoff = Backoff(config.backoff, source)
        self._number = 0
        self._epoch: Epoch | None = None
        self._changed = anyio.Event()
        self._hurried = anyio.Event()
        self._scope = anyio.CancelScope()
        self._trouble: Exception | None = None
        self._is_told = False
        self._is_refused = False  # token, version, certificate: waiting would not help
        self._is_closing = False
        self._has_failed = False  # since it was last open, or was told to hurry
        self._is_home_next = False
        self._down_since = anyio.current_time()
        self.route = Route()
        self.is_closed = False
        self.gateway: GatewayInfo | None = None

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that takes requests now, if there is one."""
        return self._epoch if self._epoch is not None and self._epoch.is_open else None

    async def run(self) -> None:
        """Keep the link up until `leave`, `retire` or cancellation."""
        try:
            with self._scope:
                while not self._is_closing:
                    self._hurried = anyio.Event()
                    epoch = await self._open()
                    if epoch is not None:
                        self._hurried = anyio.Event()
                        await self._live(epoch)
                    if not self._is_closing:
                        with anyio.move_on_after(self._backoff.next_delay_seconds()):
                            await self._hurried.wait()
        finally:
            self.is_closed = self._is_closing = True
            self._tell()

    async def wait_open(
        self, route: Route, deadline: float, *, is_patient: bool = False, is_first: bool = False
    ) -> Epoch:
        """The epoch to send requests in. Raises ConnectFailed at `deadline`, or at once if the gateway has
        refused us; LinkClosed if the client is being closed; Rerouted if `route` is over.

        A worker that is known to be gone is waited for by the patient only, as long as there are others.
        `is_first`: it is known when an attempt to connect has failed, however long that takes.
        """
        while True:
            if route.is_over:
                raise Rerouted
            if self._is_closing:
                raise LinkClosed("the client is closed")
            if self.epoch is not None:
                return self.epoch
            if self._is_refused:
                raise self._failed()
            until = deadline if is_patient else min(deadline, self._worth_waiting_until(is_first))
            with anyio.CancelScope(deadline=until):
                await self._changed.wait()
                continue
            raise self._failed()

    def _worth_waiting_until(self, is_first: bool) -> float:
        if self.route.told is None or not self._switchboard.is_reachable():
            return math.inf
        if self._has_failed:
            return -math.inf
        if is_first:
            return math.inf
        return self._down_since + (FIRST_GRACE_SECONDS if self.gateway is None else GRACE_SECONDS)

    def lead(self, endpoint: Endpoint, route: Route) -> None:
        """Dial `endpoint` from now on; who waits on the route that held so far is told that it is over."""
        self.route.is_over = True
        self._endpoint, self.route = endpoint, route
        self._is_home_next = False
        self.hurry()

    def hurry(self) -> None:
        """It may be there again: dial at once, and it is worth waiting for."""
        self._has_failed = False
        self._down_since = anyio.current_time()
        self._hurried.set()
        self._tell()

    def retire(self) -> None:
        """Nobody needs this link any more. Never waits."""
        self.route.is_over = True
        self._tell()
        self._scope.cancel()

    def _failed(self) -> ConnectFailed:
        error = ConnectFailed(str(self._endpoint), str(self._trouble or "no answer yet"))
        error.__cause__ = self._trouble
        return error

    @property
    def is_closing(self) -> bool:
        """No more requests are taken."""
        return self._is_closing

    async def leave(self) -> None:
        """Say goodbye and wait for the end, within `goodbye_seconds` all in all. Shielded."""
        self._is_closing = True
        self._tell()
        if self._epoch is None or self.is_closed:
            return
        self._epoch.say_goodbye()
        with anyio.move_on_after(self._config.timeouts.goodbye_seconds, shield=True):
            while not self.is_closed:
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # ------------------------------------------------------------ one epoch

    async def _live(self, epoch: Epoch) -> None:
        self._epoch = epoch
        self._trouble = None
        self._has_failed = self._is_home_next = False
        self._tell()
        self._switchboard.opened(self)
        try:
            await epoch.run()
        finally:
            self._epoch = None
            self._down_since = anyio.current_time()
            self._tell()
        if epoch.has_exchanged:
            self._backoff.reset()
        if self._is_closing or epoch.ending is None:
            return
        self._stats.connections_lost += 1
        self._trouble = epoch.ending.error or ConnectionError(epoch.ending.reason)
        logger.warning("%s: %s; reconnecting", self._endpoint, epoch.ending.reason)

    async def _open(self) -> Epoch | None:
        self._number += 1
        endpoint = self._next_endpoint()
        try:
            with anyio.fail_after(self._config.timeouts.connect_seconds):
                transport = await self._dial(endpoint)
                try:
                    connection = await self._greet(transport)
                except BaseException:
                    transport.abort()
                    with anyio.CancelScope(shield=True):
                        await transport.aclose()
                    raise
        except (OSError, EOFError, RemoteProtocolError, LinkRefused) as exc:  # TimeoutError is an OSError
            self._stats.connects_failed += 1
            # One that began elsewhere, before there was hope, says nothing.
            self._has_failed = endpoint == self._endpoint or not self._hurried.is_set()
            self._trouble = exc if str(exc) else TimeoutError("no answer to the handshake in time")
            self._is_refused = (isinstance(exc, LinkRefused) and exc.code is not ErrorCode.SHUTTING_DOWN) or (
                isinstance(exc, TLSFailure) and exc.is_lasting
            )
            if not self._is_told:
                self._is_told = True
                logger.warning("cannot use %s: %s; will keep trying", self._endpoint, self._trouble)
            self._tell()
            return None
        self._is_told = self._is_refused = False
        assert self.gateway is not None
        return Epoch(
            self._number,
            transport,
            connection,
            boot_id=self.gateway.boot_id,
            timeouts=self._config.timeouts,
            stats=self._stats,
        )

    def _next_endpoint(self) -> Endpoint:
        """While no worker can be reached, every other time where the gateway at large would be: it may have
        come back with other workers in other places."""
        is_home = self._is_home_next and not self._switchboard.is_reachable()
        self._is_home_next = not self._is_home_next
        return self._home if is_home else self._endpoint

    async def _greet(self, transport: Transport) -> Connection:
        connection = Connection(Role.CLIENT)
        token = self._config.token
        features = FEATURES
        if self._config.verify_payloads:
            features |= Feature.END_TO_END
        if local_transport(transport) is not None:
            features |= Feature.REGIONS
        hello = Hello(
            features=features,
            token=b"" if token is None else token.encode(),
            agent=AGENT,
        )
        broken: OSError | None = None
        try:
            await transport.send([connection.hello(hello)])
        except OSError as exc:
            broken = exc  # it may have said why before it closed
        while True:
            try:
                event = connection.next_event()
            except RemoteProtocolError as exc:
                await self._complain(transport, connection, exc)
                raise
            match event:
                case None:
                    connection.bytes_received(await transport.receive_some(connection.receive_buffers()))
                case PeerClosed() if broken is not None:
                    raise broken
                case PeerClosed():
                    raise EOFError("it closed the connection instead of answering the handshake")
                case Opened(welcome=welcome):
                    await self._check_extensions(transport, connection, welcome)
                    break
                case NoticeReceived(notice=ErrorMessage() as notice):
                    raise LinkRefused(notice.code, notice.text)
                case _:
                    raise AssertionError(f"not an event of a handshake: {event!r}")
        known = self.gateway
        if known is None or known.boot_id != welcome.boot_id:
            self._stats.boots_seen += 1
            logger.info("%s is %s, boot %s", self._endpoint, welcome.agent, welcome.boot_id.hex())
        self.gateway = GatewayInfo(
            boot_id=welcome.boot_id,
            agent=welcome.agent,
            features=connection.features,
            limits=welcome.limits,
            epoch=self._number,
            workers=1 if self.route.told is None else self.route.told.count,
        )
        self._stats.connects += 1
        return connection

    async def _check_extensions(self, transport: Transport, connection: Connection, welcome: Welcome) -> None:
        """Nothing that must not be skipped is unknown, and it is the worker that was meant."""
        tags = {extension.tag for extension in welcome.extensions if extension.tag & CRITICAL_EXTENSION}
        if tags - {WORKERS_EXTENSION}:
            reason = "a critical extension is unknown here"
            await transport.send([connection.error(ErrorCode.UNSUPPORTED_VERSION, reason)])
            raise RemoteProtocolError(reason, ErrorCode.UNSUPPORTED_VERSION)
        told, known = decode_worker_map(welcome.extensions), self.route.told
        if told != known:
            try:
                self._switchboard.reroute(self, told)
            except ValueError as exc:
                violation = RemoteProtocolError(str(exc), ErrorCode.MALFORMED)
                await self._complain(transport, connection, violation)
                raise violation from None
        elif told is not None and known is not None and told.worker != known.worker:
            raise ConnectionError(f"worker {told.worker} answers, and not worker {known.worker}")

    async def _complain(
        self, transport: Transport, connection: Connection, violation: RemoteProtocolError
    ) -> None:
        """Say why this side closes, if that is possible at once."""
        with anyio.move_on_after(LAST_WORDS_SECONDS), contextlib.suppress(OSError):
            await transport.send([connection.error(violation.code, str(violation))])
