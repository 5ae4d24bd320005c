"""How calls run at one gateway, or at one worker of it: requests, replays, and reports of damage.

A lane is a link together with what this client believes the link to lead to (its route). When the gateway
has other workers, its lanes end, and there are others; a link may serve one after the other.
"""

from collections import deque
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import anyio.to_thread

from .epoch import Epoch
from .fragmenting import Fragmenting
from .fragments import Way
from .link import Link
from .operations import (
    INLINE_HASH_BYTES,
    UNSETTLED,
    GatewayChanged,
    Operation,
    Rerouted,
    SimpleOperation,
    VectorOperation,
    WriteOperation,
)
from .ordering import Call, Order
from .pending import Outcome, Pending
from .protocol.constants import Opcode
from .protocol.errors import (
    LinkClosed,
    LinkError,
    LinkLost,
    RequestError,
    RequestTimeout,
    request_error,
)
from .protocol.messages import Check
from .replay import Fate, fate
from .sharing import RegionRead, RegionWrite
from .stats import ClientStats

MAX_UNREPORTED = 1024  # corrupt objects that wait to be reported
MOVED = "the gateway has other workers now"


class Lane:
    """See the module. `fragmenting` has the verbs; `report_damage` is its one task."""

    def __init__(
        self,
        link: Link,
        *,
        order: Order,
        stats: ClientStats,
        hashing: anyio.CapacityLimiter,
        request_seconds: float,
    ) -> None:
        self.link = link
        self.route = link.route
        self._order = order
        self._stats = stats
        self._hashing = hashing
        self._request_seconds = request_seconds
        self._scope = anyio.CancelScope()
        self._damaged: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_UNREPORTED)
        self._damage = anyio.Event()
        self.fragmenting = Fragmenting(
            perform=self.perform,
            find_way=self._find_way,
            note_damage=self._note_damage,
            hashing=hashing,
        )

    @property
    def is_open(self) -> bool:
        """Whether a request could go out now."""
        return self.link.epoch is not None

    def end(self) -> None:
        """No call will be made here any more. Never waits."""
        self._scope.cancel()

    async def _find_way(self, call: Call) -> Way:
        """How objects are stored at the gateway that is there, or will be. Where the client cuts, and where
        that is not known yet, `call` may take several requests."""
        if self.link.epoch is None:
            call.hold()
        way = (await self._wait_open(call)).way
        if not way.cuts_itself:
            call.hold()
        return way

    async def _wait_open(self, call: Call) -> Epoch:
        return await self.link.wait_open(self.route, call.deadline, is_patient=call.is_patient)

    async def perform(self, operation: SimpleOperation | WriteOperation, call: Call) -> None:
        """Drive `operation` to its end, within the time of `call`."""
        try:
            await anyio.lowlevel.checkpoint()
            while UNSETTLED in operation.statuses:
                try:
                    epoch = await self._wait_open(call)
                except Rerouted:
                    if operation.verb is Opcode.DELETE and any(
                        status != UNSETTLED for status in operation.statuses
                    ):
                        raise LinkLost(MOVED, epoch=0, maybe_applied=True) from None
                    raise
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
        if self.link.is_closing and not self.route.is_over:
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

    async def report_damage(self) -> None:
        """Ask the gateway to look at objects that arrived damaged, so that it can drop them. Until `end`."""
        with self._scope:
            await self._report_damage()

    async def _report_damage(self) -> None:
        while True:
            await self._damage.wait()
            self._damage = anyio.Event()
            while self._damaged:
                namespace = self._damaged[0][0]
                keys: list[bytes] = []
                while self._damaged and self._damaged[0][0] == namespace:
                    keys.append(self._damaged.popleft()[1])
                try:
                    await self.perform(
                        VectorOperation(Check, namespace, tuple(keys)),
                        Call(self._order, anyio.current_time() + self._request_seconds),
                    )
                except (LinkError, RequestError, RequestTimeout, Rerouted):
                    self._stats.checks_dropped += len(keys)
