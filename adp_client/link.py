"""The lane to one gateway: dial, greet, live through an epoch, back off, again (PRODUCT.md, W7).

One dial at a time, however many callers wait. This is the only place where errors of the operating system
become errors of the client.
"""

import contextlib
import logging
import random
from collections.abc import Awaitable, Callable

import anyio

from .backoff import Backoff
from .config import ClientConfig
from .epoch import LAST_WORDS_SECONDS, Epoch
from .protocol.connection import Connection
from .protocol.constants import CRITICAL_EXTENSION, ErrorCode, Feature, Role
from .protocol.errors import ConnectFailed, LinkClosed, LinkRefused, RemoteProtocolError
from .protocol.events import NoticeReceived, Opened, PeerClosed
from .protocol.messages import ErrorMessage, Hello
from .results import GatewayInfo
from .stats import ClientStats
from .transport.base import Transport, local_transport
from .transport.endpoints import Endpoint, parse_endpoint
from .transport.trust import TLSFailure

Dialer = Callable[[Endpoint], Awaitable[Transport]]

FEATURES = Feature.LEASES | Feature.FRAGMENTS | Feature.CREDITS
AGENT = "adp-client-python/0.1"
logger = logging.getLogger("adp_client")


class Link:
    """See the module. `run` is its one task; everything else may be called by any task of the same loop."""

    def __init__(
        self, config: ClientConfig, *, dial: Dialer, stats: ClientStats, source: random.Random
    ) -> None:
        self._config = config
        self._endpoint = parse_endpoint(config.endpoint)
        self._dial = dial
        self._stats = stats
        self._backoff = Backoff(config.backoff, source)
        self._number = 0
        self._epoch: Epoch | None = None
        self._changed = anyio.Event()
        self._trouble: Exception | None = None
        self._is_told = False
        self._is_refused = False  # token, version, certificate: waiting would not help
        self._is_closing = False
        self.is_closed = False
        self.gateway: GatewayInfo | None = None

    @property
    def epoch(self) -> Epoch | None:
        """The epoch that takes requests now, if there is one."""
        return self._epoch if self._epoch is not None and self._epoch.is_open else None

    async def run(self) -> None:
        """Keep the link up until `leave` or cancellation."""
        try:
            while not self._is_closing:
                epoch = await self._open()
                if epoch is not None:
                    await self._live(epoch)
                if not self._is_closing:
                    await anyio.sleep(self._backoff.next_delay_seconds())
        finally:
            self.is_closed = self._is_closing = True
            self._tell()

    async def wait_open(self, deadline: float) -> Epoch:
        """The epoch to send requests in. Raises ConnectFailed at `deadline`, or at once if the gateway has
        refused us; LinkClosed if the client is being closed."""
        while True:
            if self._is_closing:
                raise LinkClosed("the client is closed")
            if self.epoch is not None:
                return self.epoch
            if self._is_refused:
                raise self._failed()
            with anyio.CancelScope(deadline=deadline):
                await self._changed.wait()
                continue
            raise self._failed()

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
        self._tell()
        try:
            await epoch.run()
        finally:
            self._epoch = None
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
        try:
            with anyio.fail_after(self._config.timeouts.connect_seconds):
                transport = await self._dial(self._endpoint)
                try:
                    connection = await self._greet(transport)
                except BaseException:
                    transport.abort()
                    with anyio.CancelScope(shield=True):
                        await transport.aclose()
                    raise
        except (OSError, EOFError, RemoteProtocolError, LinkRefused) as exc:  # TimeoutError is an OSError
            self._stats.connects_failed += 1
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
                    if any(extension.tag & CRITICAL_EXTENSION for extension in welcome.extensions):
                        reason = "a critical extension is unknown here"
                        await transport.send([connection.error(ErrorCode.UNSUPPORTED_VERSION, reason)])
                        raise RemoteProtocolError(reason, ErrorCode.UNSUPPORTED_VERSION)
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
        )
        self._stats.connects += 1
        return connection

    async def _complain(
        self, transport: Transport, connection: Connection, violation: RemoteProtocolError
    ) -> None:
        """Say why this side closes, if that is possible at once."""
        with anyio.move_on_after(LAST_WORDS_SECONDS), contextlib.suppress(OSError):
            await transport.send([connection.error(violation.code, str(violation))])
