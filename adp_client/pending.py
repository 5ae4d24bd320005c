"""One request on its way, and what its call will learn of it."""

import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from .protocol.constants import ErrorCode
from .protocol.errors import LocalProtocolError
from .protocol.messages import Request

if TYPE_CHECKING:
    from .operations import Operation
    from .regions import SharedRegion


class Outcome(enum.Enum):
    """How a request ended."""

    ANSWERED = "answered"
    REFUSED = "refused"  # as a whole; the code is in `Pending.code`
    EXPIRED = "expired"  # its deadline passed
    LOST = "lost"  # the connection ended first
    UNSAYABLE = "unsayable"  # the core refused to encode it; the reason is in `Pending.error`
    WITHDRAWN = "withdrawn"  # the caller left before it was sent


@attrs.frozen
class Frame:
    """One frame of a request: a message, and the memory that follows it."""

    message: Request
    payload: Sequence[memoryview] = ()
    descriptor: int | None = None  # that travels along


@attrs.define(eq=False, kw_only=True)
class Pending:
    """A request from the moment it is queued to its outcome. State changes are synchronous.

    `items` are positions in the operation's vectors, in wire order.
    """

    operation: "Operation"
    items: Sequence[int]
    frames: Sequence[Frame]
    cost_bytes: int = 0
    written_regions: "Sequence[SharedRegion]" = ()  # by the gateway, until it has answered
    deadline: float = math.inf  # of the call: queueing counts
    was_sent: bool = False
    outcome: Outcome | None = None
    code: ErrorCode = ErrorCode.OK
    retry_after_ms: int = 0
    sent_at: float = math.inf
    lease_ids: set[int] = attrs.field(factory=set)  # granted in the answer so far
    lease_ms: int = 0
    error: LocalProtocolError | None = None

    def finish(self, outcome: Outcome) -> None:
        """Settle it and wake the caller. Once."""
        if self.outcome is None:
            self.outcome = outcome
            self.frames = ()  # they hold the caller's memory
            self.operation.pending_count -= 1
            self.operation.notify()
