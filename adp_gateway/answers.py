"""How a session answers: whole replies on the prompt lane, refusals in turn, errors as codes.

Every part of a session that handles requests (`reading`, `writing`, the session itself) answers through here.
"""

import logging
from typing import TypeAlias

import anyio
import attrs

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import (
    Exist,
    ExistReply,
    Read,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    Reply,
    Request,
    StatusReply,
)

from .errors import CorruptRecord, DeviceFull, StorageError
from .meter import Meter
from .outbox import Frame, Outbox
from .replies import status_replies
from .shared import Shared

log = logging.getLogger(__name__)

_STORAGE_CODES: dict[type[StorageError], ErrorCode] = {
    CorruptRecord: ErrorCode.CORRUPT,
    DeviceFull: ErrorCode.CAPACITY_EXHAUSTED,
}


Refusal: TypeAlias = StatusReply | ExistReply | ReadReply | ReadRegionReply


@attrs.define(eq=False, kw_only=True)
class Answers:
    """The answering side of one connection. The two limits are the client's, known after its HELLO."""

    connection: Connection
    outbox: Outbox
    shared: Shared
    meter: Meter
    peer: str
    max_body_bytes: int = 0
    max_payload_bytes: int = 0
    is_over: bool = False  # nobody is left to answer

    def encode(self, request_id: int, reply: Reply, *, is_final: bool = True, unanswered: int = 0) -> bytes:
        """The frame of a reply, which counts as sent. `unanswered`: items that it speaks for as a whole."""
        self.meter.reply(request_id, reply, is_final, unanswered)
        return self.connection.reply(request_id, reply, is_final=is_final)

    def prompt(self, request_id: int, reply: Reply, *, is_final: bool = True, unanswered: int = 0) -> None:
        """Answer as soon as the frame under way is out."""
        self.outbox.put_prompt(self.encode(request_id, reply, is_final=is_final, unanswered=unanswered))

    def statuses(self, request_id: int, statuses: bytes) -> None:
        """One status for each item, in as many frames as the client's limit asks for."""
        replies = status_replies(statuses, max_body_bytes=self.max_body_bytes)
        for number, reply in enumerate(replies, 1):
            self.prompt(request_id, reply, is_final=number == len(replies))

    def refuse(self, request_id: int, message: Request, code: ErrorCode) -> None:
        """Answer a whole request with `code`, whatever of it has been answered already."""
        kinds: dict[type, type[Refusal]] = {Exist: ExistReply, Read: ReadReply, ReadRegion: ReadRegionReply}
        reply = self.refusal(kinds.get(type(message), StatusReply), code)
        unanswered = len(getattr(message, "keys", ()))
        self.outbox.put_in_turn(Frame(parts=[self.encode(request_id, reply, unanswered=unanswered)]))

    def refusal(self, kind: type[Refusal], code: ErrorCode) -> Refusal:
        """A reply that says `code` of the whole request, and when to come back if that helps."""
        retry_after_ms = self.shared.admission.retry_after_ms if code is ErrorCode.OVERLOADED else 0
        return kind(status=code, retry_after_ms=retry_after_ms)

    def code_for(self, exc: Exception) -> ErrorCode:
        """What a client is told of `exc`; a bug is logged with its traceback and is nobody else's trouble."""
        self.shared.counters.faults += 1
        if isinstance(exc, StorageError):
            self._complain(f"storage failed: {type(exc).__name__}", str(exc))
            return _STORAGE_CODES.get(type(exc), ErrorCode.GATEWAY_FAULT)
        self._complain(f"a request failed: {type(exc).__name__}", bug=exc)
        return ErrorCode.GATEWAY_FAULT

    def _complain(self, matter: str, reason: str = "", *, bug: Exception | None = None) -> None:
        """Clients choose how often they ask for what fails."""
        self.shared.complaints.tell(
            log, logging.ERROR, self.peer, matter, reason, now=anyio.current_time(), bug=bug
        )
