"""The core: bytes and time in, events and bytes out; no I/O, no clock, no threads (spec sections 3 to 7).

The owner's loop:

    views = connection.receive_buffers()      # receive into these
    connection.bytes_received(count)          # 0: the peer closed
    while (event := connection.next_event()) is not None: ...

and to speak, `hello`/`request`/`reply`/`notice` return the bytes to send. For messages with payload the owner
sends `payload_lengths(message)` bytes right behind them, nothing in between.

RemoteProtocolError from `next_event` ends the connection: send `error(...)` if you like, then close. A
LocalProtocolError means that this side asked for something impossible; nothing changed.
"""

import zlib
from collections import deque
from collections.abc import Sequence

import attrs

from .buffer import ReceiveBuffer
from .codec import OPCODES, decode_body, encode_body
from .constants import (
    HANDSHAKE_BODY_BYTES,
    HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_TEXT_BYTES,
    MIN_BODY_BYTES,
    ErrorCode,
    Feature,
    Flag,
    Opcode,
    Role,
)
from .errors import LocalProtocolError, RemoteProtocolError
from .events import (
    Event,
    HelloReceived,
    NoticeReceived,
    Opened,
    PayloadExpected,
    PeerClosed,
    ReplyReceived,
    RequestExpired,
    RequestReceived,
)
from .exchange import Exchange
from .frames import FrameHeader, check_beginning, check_body, decode_header, encode_header
from .messages import (
    Credit,
    ErrorMessage,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Notice,
    Reply,
    Request,
    Welcome,
    payload_lengths,
)
from .state import Machine, State, Step
from .window import Window

#: Times that descriptors came, without a frame that took them: with a frame that is not whole, and the next.
MAX_EARLY_DESCRIPTORS = 2

_NOTICE_STEPS: dict[type, tuple[Step, Step]] = {
    Goodbye: (Step.SEND_GOODBYE, Step.RECEIVE_GOODBYE),
    Credit: (Step.SEND_CREDIT, Step.RECEIVE_CREDIT),
    ErrorMessage: (Step.SEND_ERROR, Step.RECEIVE_ERROR),
}


@attrs.frozen
class _Descriptors:
    """`count` descriptors that came along with bytes `[begin, end)` of the stream."""

    begin: int
    end: int
    count: int


class Connection:
    """One connection, seen from one side."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._machine = Machine(role)
        self._buffer = ReceiveBuffer()
        self._header: FrameHeader | None = None
        self._expected: PayloadExpected | None = None
        self._is_accepted = False
        self._is_eof = False
        self._is_eof_told = False
        self._has_late_bytes = False  # something came behind the last word
        self._events: deque[Event] = deque()
        self._exchanges: dict[int, Exchange] = {}
        self._last_id = 0
        self._hello = Hello()
        self.features = Feature.NONE
        self.limits = Limits()
        self._window = Window(0, 0)
        self._received_bytes = 0
        self._descriptors: deque[_Descriptors] = deque()  # that no frame has taken yet

    @property
    def state(self) -> State:
        """Where the connection stands."""
        return self._machine.state

    @property
    def in_flight(self) -> int:
        """Requests without their final reply."""
        return len(self._exchanges)

    # ------------------------------------------------------------ speaking

    def hello(self, hello: Hello) -> bytes:
        """Client: the first bytes of a connection."""
        raw = self._encode(hello, Opcode.HELLO, 0)
        self._machine.take(Step.SEND_HELLO)
        self._hello = hello
        return raw

    def accept(self, welcome: Welcome) -> bytes:
        """Gateway: answer HELLO. Features are cut down to what the client offered too."""
        _check_limits(welcome.limits)
        welcome = _with_features(welcome, welcome.features & self._hello.features)
        raw = self._encode(welcome, Opcode.HELLO, 0, Flag.REPLY)
        self._machine.take(Step.SEND_WELCOME)
        self._agree(welcome)
        return raw

    def request(
        self,
        message: Request,
        *,
        request_id: int | None = None,
        is_final: bool = True,
        deadline: float | None = None,
    ) -> tuple[int, bytes]:
        """Client: a request (its id is made here), or with `request_id` the next frame of one.

        `deadline` is on the owner's clock; `handle_timeout` compares it. Returns the id and the bytes. Raises
        LocalProtocolError when the spec or the announced limits forbid it.
        """
        step = Step.SEND_REQUEST if request_id is None else Step.CONTINUE_REQUEST
        if isinstance(message, Goodbye):
            step = Step.SEND_GOODBYE
        if not self._machine.allows(step):
            self._machine.take(step)
        opcode = OPCODES[type(message)]
        number = self._last_id + 1 if request_id is None else request_id
        raw = self._encode(message, opcode, number, Flag.NONE if is_final else Flag.MORE)
        self._ask(number, message, opcode, is_final, is_new=request_id is None)
        self._machine.take(step)
        if deadline is not None:
            self._exchanges[number].deadline = deadline
        return number, raw

    def reply(self, request_id: int, message: Reply, *, is_final: bool = True) -> bytes:
        """Gateway: one frame of the answer to `request_id`."""
        exchange = self._exchanges.get(request_id)
        if exchange is None:
            raise LocalProtocolError(f"no request {request_id}", ErrorCode.UNEXPECTED_MESSAGE)
        is_goodbye = isinstance(message, GoodbyeReply)
        step = Step.SEND_GOODBYE_REPLY if is_goodbye else Step.SEND_REPLY
        if not self._machine.allows(step):
            self._machine.take(step)
        if is_goodbye and len(self._exchanges) > 1:
            raise LocalProtocolError("requests are unanswered", ErrorCode.UNEXPECTED_MESSAGE)
        flags = Flag.REPLY if is_final else Flag.REPLY | Flag.MORE
        raw = self._encode(message, exchange.opcode, request_id, flags)
        self._answer(request_id, exchange, message, is_final)
        self._machine.take(step)
        return raw

    def notice(self, notice: Notice) -> bytes:
        """A frame that nobody asked for. GOODBYE and CREDIT are the gateway's; ERROR is anybody's last."""
        if isinstance(notice, Credit) and not self.features & Feature.CREDITS:
            raise LocalProtocolError("CREDITS was not agreed on", ErrorCode.UNEXPECTED_MESSAGE)
        if isinstance(notice, Goodbye) and self.role is Role.CLIENT:
            raise LocalProtocolError("a client's GOODBYE is a request", ErrorCode.UNEXPECTED_MESSAGE)
        if isinstance(notice, Credit):
            # Only checked: requests may be on their way that the client sent before it will hear of this.
            Window(self.limits.max_requests, self.limits.max_inflight_bytes).credit(
                notice.requests, notice.inflight_bytes
            )
        raw = self._encode(notice, OPCODES[type(notice)], 0)
        self._machine.take(_NOTICE_STEPS[type(notice)][0])
        return raw

    def error(self, code: ErrorCode, text: str) -> bytes:
        """The last frame: why this side closes."""
        return self.notice(
            ErrorMessage(code=code, text=text.encode()[:MAX_TEXT_BYTES].decode("utf-8", "ignore"))
        )

    def fits(self, cost_bytes: int) -> bool:
        """Client: whether a request of `cost_bytes` (objects written, or memory offered) may go now."""
        return self._window.fits(cost_bytes)

    def _encode(self, message: Message, opcode: Opcode, request_id: int, flags: Flag = Flag.NONE) -> bytes:
        body = encode_body(message)
        payload_bytes = sum(payload_lengths(message))
        max_body, max_payload = self._peer_limits()
        if len(body) > max_body:
            raise LocalProtocolError(f"a body of {len(body)} bytes", ErrorCode.LIMIT_EXCEEDED)
        if payload_bytes > max_payload:
            raise LocalProtocolError(f"a payload of {payload_bytes} bytes", ErrorCode.LIMIT_EXCEEDED)
        header = FrameHeader(
            opcode=opcode,
            flags=flags,
            request_id=request_id,
            body_bytes=len(body),
            payload_bytes=payload_bytes,
            body_crc=zlib.crc32(body),
        )
        return encode_header(header) + body

    def _peer_limits(self) -> tuple[int, int]:
        """What the other side receives: the client told it in HELLO, the gateway in WELCOME."""
        if self.state in (State.START, State.GREETING):
            return HANDSHAKE_BODY_BYTES, 0
        told = self.limits if self.role is Role.CLIENT else self._hello
        return told.max_body_bytes, told.max_payload_bytes

    def _own_limits(self) -> tuple[int, int]:
        if self.state in (State.START, State.GREETING):
            return HANDSHAKE_BODY_BYTES, 0
        told = self._hello if self.role is Role.CLIENT else self.limits
        return told.max_body_bytes, told.max_payload_bytes

    def _agree(self, welcome: Welcome) -> None:
        self.features = welcome.features
        self.limits = welcome.limits
        self._window.resize(welcome.limits.max_requests, welcome.limits.max_inflight_bytes)

    # ------------------------------------------------------------ both directions

    def _ask(
        self, request_id: int, message: Request, opcode: Opcode, is_final: bool, *, is_new: bool
    ) -> None:
        exchange = Exchange(opcode, self.limits, self.features) if is_new else self._exchanges.get(request_id)
        if exchange is None:
            raise LocalProtocolError(f"no request {request_id} to continue", ErrorCode.UNEXPECTED_MESSAGE)
        cost_bytes = exchange.ask(message, is_final)
        if not is_new:
            self._window.take(cost_bytes)
            return
        self._window.open(cost_bytes)
        self._exchanges[request_id] = exchange
        self._last_id = request_id

    def _answer(self, request_id: int, exchange: Exchange, message: Reply, is_final: bool) -> None:
        exchange.answer(message, is_final)
        if exchange.is_answered:
            del self._exchanges[request_id]
            self._window.close(exchange.cost_bytes)

    # ------------------------------------------------------------ listening

    def receive_buffers(self) -> list[memoryview]:
        """Memory for the next bytes, in order. Empty while a payload waits for `accept_payload`."""
        if self.is_waiting_for_memory:
            return []
        return self._buffer.views()

    @property
    def is_waiting_for_memory(self) -> bool:
        """A PayloadExpected has not been answered with `accept_payload` yet."""
        return self._expected is not None and not self._is_accepted

    @property
    def is_receiving_payload(self) -> bool:
        """The next bytes go into memory given by `accept_payload`."""
        return self._expected is not None and self._is_accepted and not self._buffer.is_filled

    @property
    def payload_bytes_left(self) -> int:
        """How much of the payload that was accepted is not in yet."""
        return self._buffer.left_bytes

    @property
    def is_mid_frame(self) -> bool:
        """The peer has begun a frame and owes the rest of it."""
        return self._header is not None or self._expected is not None or not self._buffer.is_empty

    def bytes_received(self, count: int, *, descriptors: int = 0) -> None:
        """`count` bytes are in `receive_buffers()`; 0 means that the peer has closed its side.

        `descriptors` came along with them. The owner keeps them, in order: each RegionOpen that `next_event`
        tells takes the oldest, and a RemoteProtocolError means that there are too many of them, or too few.
        """
        if count == 0:
            self._is_eof = True
        else:
            self._buffer.received(count)
        if descriptors:
            self._descriptors.append(
                _Descriptors(self._received_bytes, self._received_bytes + count, descriptors)
            )
        self._received_bytes += count

    def accept_payload(self, targets: Sequence[memoryview | None]) -> None:
        """Memory for the payload that PayloadExpected spoke of; None for an item whose bytes nobody wants.

        Raises LocalProtocolError if the sizes differ from `PayloadExpected.lengths`.
        """
        if self._expected is None or self._is_accepted:
            raise LocalProtocolError("no payload is expected", ErrorCode.UNEXPECTED_MESSAGE)
        lengths = self._expected.lengths
        if len(targets) != len(lengths):
            raise LocalProtocolError("memory for another number of items than the payload has")
        sizes = [
            length if target is None else target.nbytes
            for target, length in zip(targets, lengths, strict=True)
        ]
        if tuple(sizes) != lengths:
            raise LocalProtocolError("memory of another size than the payload")
        self._is_accepted = True
        self._buffer.aim(
            [size if target is None else target for target, size in zip(targets, sizes, strict=True)]
        )

    def drop_targets(self) -> None:
        """The owner receives no more: keep no view of memory that it gave."""
        self._buffer.drop_targets()

    def next_event(self) -> Event | None:
        """The next thing that happened, or None if bytes (or memory for a payload) are needed first.

        Raises RemoteProtocolError if the peer broke the spec; the state is FAILED then.
        """
        if self._events:
            return self._events.popleft()
        try:
            return self._next_event()
        except LocalProtocolError as exc:
            self._machine.take(Step.VIOLATION)
            self._buffer.drop_targets()
            raise RemoteProtocolError(str(exc), exc.code) from None

    def _next_event(self) -> Event | None:
        if len(self._descriptors) > MAX_EARLY_DESCRIPTORS:
            raise LocalProtocolError("descriptors that belong to no frame", ErrorCode.UNEXPECTED_MESSAGE)
        if self._expected is not None:
            if self._is_accepted and self._buffer.is_filled:
                return self._finish_payload(self._expected)
            return None if not self._is_eof or self.is_waiting_for_memory else self._end()
        if self.state in (State.CLOSED, State.FAILED):
            self._has_late_bytes |= not self._buffer.is_empty
            self._buffer.drop_unparsed()  # or there would be no room for the next bytes, nor for their end
            return self._end() if self._is_eof else None
        if self._header is None:
            raw = self._buffer.peek(HEADER_BYTES)
            if raw is None:
                check_beginning(self._buffer.unparsed)
                return self._end() if self._is_eof else None
            header = decode_header(raw)
            max_body, max_payload = self._own_limits()
            if header.body_bytes > max_body:
                raise LocalProtocolError(f"a body of {header.body_bytes} bytes", ErrorCode.LIMIT_EXCEEDED)
            if header.payload_bytes > max_payload:
                raise LocalProtocolError(
                    f"a payload of {header.payload_bytes} bytes", ErrorCode.LIMIT_EXCEEDED
                )
            self._check_descriptors(header)
            self._buffer.consume(HEADER_BYTES)
            self._header = header
        body = self._buffer.peek(self._header.body_bytes)
        if body is None:
            return self._end() if self._is_eof else None
        header, self._header = self._header, None
        check_body(header, body)
        message = decode_body(header.opcode, bool(header.flags & Flag.REPLY), body)
        lengths = payload_lengths(message)
        if sum(lengths) != header.payload_bytes:
            raise LocalProtocolError(f"{header.payload_bytes} bytes of payload for {sum(lengths)}")
        del body
        self._buffer.consume(header.body_bytes)
        event = self._dispatch(header, message)
        if header.payload_bytes == 0:
            return event
        assert isinstance(event, (RequestReceived, ReplyReceived))
        self._expected = PayloadExpected(
            request_id=header.request_id, message=message, lengths=lengths, is_final=event.is_final
        )
        self._is_accepted = False
        return self._expected

    def _check_descriptors(self, header: FrameHeader) -> None:
        """A descriptor comes with the first byte of a REGION_OPEN. No receiver sees that exactly: the system
        hands over bytes from before it as well, in one go."""
        begun = self._received_bytes - len(self._buffer.unparsed)
        early = self._descriptors
        if early and early[0].end <= begun:
            raise LocalProtocolError(
                "a descriptor with a frame that takes none", ErrorCode.UNEXPECTED_MESSAGE
            )
        if header.opcode is not Opcode.REGION_OPEN or header.flags & Flag.REPLY:
            return
        if not early or early[0].begin > begun or early.popleft().count != 1:
            raise LocalProtocolError("REGION_OPEN comes with one descriptor", ErrorCode.UNEXPECTED_MESSAGE)

    def _dispatch(self, header: FrameHeader, message: Message) -> Event:
        """Check one whole body against the state and the exchange it belongs to."""
        is_final = not header.flags & Flag.MORE
        number = header.request_id
        if isinstance(message, (Hello, Welcome)):
            return self._greet(message, number, is_final)
        if header.flags & Flag.REPLY:
            return self._receive_reply(number, message, header.opcode, is_final)  # type: ignore[arg-type]
        if isinstance(message, (ErrorMessage, Credit)) or (isinstance(message, Goodbye) and number == 0):
            return self._receive_notice(number, message, is_final)
        return self._receive_request(number, message, header.opcode, is_final)  # type: ignore[arg-type]

    def _greet(self, message: Hello | Welcome, number: int, is_final: bool) -> Event:
        if number or not is_final:
            raise LocalProtocolError("a handshake is one frame, with request id 0")
        if isinstance(message, Hello):
            self._machine.take(Step.RECEIVE_HELLO)
            self._hello = message
            return HelloReceived(hello=message)
        if message.features & ~self._hello.features:
            raise LocalProtocolError("a feature that was not offered")
        if not self._hello.min_version <= message.version <= self._hello.max_version:
            raise LocalProtocolError(f"version {message.version}", ErrorCode.UNSUPPORTED_VERSION)
        _check_limits(message.limits)
        self._machine.take(Step.RECEIVE_WELCOME)
        self._agree(message)
        return Opened(welcome=message)

    def _receive_notice(self, number: int, notice: Notice, is_final: bool) -> Event:
        if number or not is_final:
            raise LocalProtocolError("a notice is one frame, with request id 0")
        if isinstance(notice, Goodbye) and self.role is Role.GATEWAY:
            raise LocalProtocolError("a client's GOODBYE is a request", ErrorCode.UNEXPECTED_MESSAGE)
        if isinstance(notice, Credit):
            if not self.features & Feature.CREDITS:
                raise LocalProtocolError("CREDITS was not agreed on", ErrorCode.UNEXPECTED_MESSAGE)
            self._window.credit(notice.requests, notice.inflight_bytes)
        self._machine.take(_NOTICE_STEPS[type(notice)][1])
        return NoticeReceived(notice=notice)

    def _receive_request(self, number: int, message: Request, opcode: Opcode, is_final: bool) -> Event:
        if isinstance(message, Goodbye) and self.role is Role.CLIENT:
            raise LocalProtocolError("a gateway's GOODBYE is a notice, with request id 0")
        self._machine.take(Step.RECEIVE_GOODBYE if isinstance(message, Goodbye) else Step.RECEIVE_REQUEST)
        is_new = number > self._last_id
        self._ask(number, message, opcode, is_final, is_new=is_new)
        return RequestReceived(request_id=number, message=message, is_final=is_final)

    def _receive_reply(self, number: int, message: Reply, opcode: Opcode, is_final: bool) -> Event:
        exchange = self._exchanges.get(number)
        self._machine.take(
            Step.RECEIVE_GOODBYE_REPLY if isinstance(message, GoodbyeReply) else Step.RECEIVE_REPLY
        )
        if exchange is None or exchange.opcode is not opcode:
            raise LocalProtocolError(
                f"a reply to {opcode.name} {number}, which is not open", ErrorCode.UNEXPECTED_MESSAGE
            )
        self._answer(number, exchange, message, is_final)
        return ReplyReceived(request_id=number, message=message, is_final=is_final)

    def _finish_payload(self, expected: PayloadExpected) -> Event:
        self._expected = None
        self._buffer.drop_targets()
        kind = ReplyReceived if self.role is Role.CLIENT else RequestReceived
        return kind(
            request_id=expected.request_id,
            message=expected.message,  # type: ignore[arg-type]
            is_final=expected.is_final,
        )

    def _end(self) -> Event | None:
        if self._is_eof_told:
            return None
        self._is_eof_told = True
        is_clean = (
            self.state is not State.FAILED
            and self._header is None
            and self._expected is None
            and self._buffer.is_empty
            and not self._has_late_bytes
            and not self._exchanges
        )
        self._machine.take(Step.RECEIVE_EOF)
        self._expected = None
        self._buffer.drop_targets()
        return PeerClosed(is_clean=is_clean)

    # ------------------------------------------------------------ time

    def next_deadline(self) -> float | None:
        """When `handle_timeout` should be called next, on the owner's clock; None: no need."""
        times = [e.deadline for e in self._exchanges.values() if e.deadline is not None]
        return min(times, default=None)

    def handle_timeout(self, now: float) -> None:
        """Tell RequestExpired, once each, for requests whose deadline is not after `now`."""
        for request_id, exchange in self._exchanges.items():
            if exchange.deadline is not None and exchange.deadline <= now:
                exchange.deadline = None
                self._events.append(RequestExpired(request_id=request_id))


def _check_limits(limits: Limits) -> None:
    """With less than these no object could be named, written or read (section 4.3)."""
    least = {"max_body_bytes": MIN_BODY_BYTES, "max_lease_ms": 0}
    for name, value in attrs.asdict(limits).items():
        if value < least.get(name, 1):
            raise LocalProtocolError(f"{name} is {value}, and must be at least {least.get(name, 1)}")
    if limits.max_key_bytes > MAX_KEY_BYTES:
        raise LocalProtocolError(f"max_key_bytes is {limits.max_key_bytes}, and at most {MAX_KEY_BYTES}")


def _with_features(welcome: Welcome, features: Feature) -> Welcome:
    return Welcome(
        version=welcome.version,
        features=features,
        boot_id=welcome.boot_id,
        limits=welcome.limits,
        agent=welcome.agent,
        extensions=welcome.extensions,
    )
