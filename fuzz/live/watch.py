"""One connection, heard from the outside: what has been said, in both directions, and whether that may be.

The judge of what we say is the protocol's own core in the role of a gateway: it is given every byte that goes
out and tells requests from violations. What the gateway answers is given to it as if it were its own reply,
so that every rule for replies holds here too. `model` judges the bytes of objects.
"""

import time
from collections.abc import Iterable

import attrs

from adp_client.protocol import Connection, ErrorCode, Feature, Role
from adp_client.protocol.codec import OPCODES, decode_body
from adp_client.protocol.constants import HANDSHAKE_BODY_BYTES, HEADER_BYTES, Flag
from adp_client.protocol.errors import LocalProtocolError, RemoteProtocolError
from adp_client.protocol.events import HelloReceived, NoticeReceived, PayloadExpected, RequestReceived
from adp_client.protocol.frames import FrameHeader, check_body, decode_header
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Message,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    Reply,
    Request,
    StatusReply,
    Welcome,
    Write,
    payload_lengths,
)
from adp_client.protocol.state import State

from .model import Finding, Lease, Model, Moment, Removal, Subject, Version

_NEITHER_THERE_NOR_NOT = frozenset(ErrorCode) - {ErrorCode.OK, ErrorCode.NOT_FOUND}


@attrs.define(eq=False, kw_only=True)
class _Asked:
    """A request without its final answer."""

    request_id: int
    message: Request
    moment: Moment
    asked_at: float
    is_whole: bool = False  # its last frame is out
    subjects: list[Subject] = attrs.field(factory=list)
    versions: list[Version] = attrs.field(factory=list)  # of a WRITE, one for each subject
    removals: list[Removal] = attrs.field(factory=list)  # of a DELETE
    outcomes: dict[int, int] = attrs.field(factory=dict)
    halves: dict[int, bytearray] = attrs.field(factory=dict)  # objects that are coming in

    @property
    def name(self) -> str:
        return f"{OPCODES[type(self.message)].name} {self.request_id}"

    def waits_for(self, other: Moment) -> bool:
        """Whether a FENCE, or its own nature, keeps it behind a request that has not been finished."""
        if isinstance(self.message, (Fence, Goodbye)):
            return other.sent < self.moment.sent
        return other.era < self.moment.era


class Watch:
    """Give it what is sent and what is received. It raises Finding."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._core = Connection(Role.GATEWAY)
        self._hello: Hello | None = None
        self._held = b""  # said behind HELLO and before WELCOME
        self._heard = bytearray()
        self._parts: list[bytearray] = []
        self._asked: dict[int, _Asked] = {}
        self._era = 0
        self._was_early = False
        self._has_quit = False  # we have said ERROR
        self.welcome: Welcome | None = None
        self.violation: RemoteProtocolError | None = None
        self.is_certain = True
        self.error: ErrorMessage | None = None
        self.is_left = False  # GOODBYE was answered, or we have said ERROR
        self.is_draining = False
        self.statuses: list[int] = []  # of items, since somebody emptied it: for counting

    # ------------------------------------------------------------ what is owed

    @property
    def is_greeted(self) -> bool:
        """A whole HELLO is out."""
        return self._hello is not None

    @property
    def is_answered(self) -> bool:
        """Every request that can be answered has its final answer."""
        return not self.open_requests

    @property
    def is_owing(self) -> bool:
        """We have begun something that we have not finished."""
        return (
            self._hello is None
            or self._core.is_mid_frame
            or any(not asked.is_whole for asked in self._asked.values())
        )

    @property
    def is_early(self) -> bool:
        """We have said something behind HELLO without waiting for the answer: it may be refused."""
        if self._hello is not None and self.welcome is None:
            self._was_early |= bool(self._held or self._core.is_mid_frame)
        return self._was_early

    @property
    def open_requests(self) -> list[str]:
        """What has no final answer, and needs nothing more from us for it."""
        unfinished = [asked.moment for asked in self._asked.values() if not asked.is_whole]
        return [
            asked.name
            for asked in self._asked.values()
            if asked.is_whole and not any(asked.waits_for(moment) for moment in unfinished)
        ]

    @property
    def expected(self) -> str:
        """What must come now, in words."""
        if self.violation is not None:
            certainly = "" if self.is_certain else "perhaps "
            return f"{certainly}ERROR ({self.violation.code.name}: {self.violation}), then the end"
        if self._hello is not None and self.welcome is None:
            return "WELCOME, or ERROR and the end"
        open_requests = self.open_requests
        owed = f"answers to {', '.join(open_requests)}" if open_requests else "nothing"
        return f"{owed}; we owe the rest of a frame or request" if self.is_owing else owed

    @property
    def lease_seconds_left(self) -> float:
        """Until the last lease of any connection ends by itself."""
        return self._model.lease_seconds_left

    @property
    def lease_ids(self) -> list[int]:
        """Leases of this connection."""
        return [number for number, lease in self._model.leases.items() if lease.connection is self]

    # ------------------------------------------------------------ our side

    def sent(self, data: bytes) -> None:
        """`data` is about to go out."""
        if self._hello is not None and self.welcome is None:
            self._held += data
            return
        at = 0
        while at < len(data) and self.violation is None and not self.is_left:
            view = self._core.receive_buffers()[0]
            count = min(len(view), len(data) - at)
            view[:count] = data[at : at + count]
            self._core.bytes_received(count)
            at += count
            self._pump()
            if self._hello is not None and self.welcome is None:
                self._held += data[at:]
                return

    def _pump(self) -> None:
        try:
            while (event := self._core.next_event()) is not None:
                match event:
                    case HelloReceived(hello=hello):
                        self._hello = hello
                        return  # what stands behind it is judged when WELCOME has come
                    case PayloadExpected(request_id=number, message=message, lengths=lengths):
                        self._parts = [bytearray(length) for length in lengths]
                        self._core.accept_payload([memoryview(part) for part in self._parts])
                        self._add(number, message)
                    case RequestReceived(request_id=number, message=message, is_final=is_final):
                        asked = self._add(number, message)
                        asked.is_whole = is_final
                        self._parts = []
                        if isinstance(message, Fence):
                            self._era += 1
                    case NoticeReceived():
                        self.is_left = self._has_quit = True
                        self.ended()
                        return
                    case _:
                        raise AssertionError(f"not an event of a gateway: {event}")
        except RemoteProtocolError as exc:
            self.violation = exc
            self._model.end_leases(self)
            # The gateway may have answered what we have not heard yet: then its window has room.
            # And it should, but need not, judge the magic before it has a whole header.
            has_room = "in flight" in str(exc) and bool(self._asked)
            is_short = len(self._core._buffer.unparsed) < HEADER_BYTES
            self.is_certain = not (has_room or (exc.code is ErrorCode.BAD_MAGIC and is_short))

    def _add(self, number: int, message: Message) -> _Asked:
        """One frame of a request, seen when its body is there and, with a payload, again when that is."""
        assert not isinstance(message, (Credit, ErrorMessage))
        asked = self._asked.get(number)
        if asked is None:
            moment = Moment(sent=self._model.tick(), connection=self, era=self._era)
            asked = self._asked[number] = _Asked(
                request_id=number,
                message=message,  # type: ignore[arg-type]
                moment=moment,
                asked_at=time.monotonic(),
            )
            if isinstance(message, (Exist, Read, Delete, Check)):
                asked.subjects = [(message.namespace, key) for key in message.keys]
            if isinstance(message, Delete):
                for subject in asked.subjects:
                    asked.removals.append(Removal(moment=moment))
                    self._model.removals.setdefault(subject, []).append(asked.removals[-1])
        if isinstance(message, Write) and (self._parts or not any(payload_lengths(message))):
            self._add_versions(asked, message)
        return asked

    def _add_versions(self, asked: _Asked, message: Write) -> None:
        parts, self._parts = self._parts or [bytearray() for _ in message.items], []
        for key, item, part in zip(message.keys, message.items, parts, strict=True):
            if item.offset:
                asked.versions[-1].parts.append(part)
                continue
            subject = (message.namespace, key)
            version = Version(
                moment=asked.moment, object_bytes=item.object_bytes, checksum=item.checksum, parts=[part]
            )
            asked.subjects.append(subject)
            asked.versions.append(version)
            self._model.versions.setdefault(subject, []).append(version)

    def ended(self) -> None:
        """The connection is over, or is about to be by our doing."""
        self._model.end_leases(self)

    # ------------------------------------------------------------ the gateway's side

    def received(self, data: bytes | memoryview) -> None:
        """Bytes from the gateway."""
        if self.error is not None:
            raise Finding("the gateway speaks on after its ERROR")
        self._heard += data
        while (frame := self._next_frame()) is not None:
            self._take(*frame)

    def _next_frame(self) -> tuple[FrameHeader, Message, bytes] | None:
        if len(self._heard) < HEADER_BYTES:
            return None
        try:
            header = decode_header(memoryview(bytes(self._heard[:HEADER_BYTES])))
            max_body, max_payload = self._max_sizes()
            if header.body_bytes > max_body or header.payload_bytes > max_payload:
                raise Finding(f"a frame above our limits: {header}")
            body_end = HEADER_BYTES + header.body_bytes
            end = body_end + header.payload_bytes
            if len(self._heard) < end:
                return None
            body = bytes(self._heard[HEADER_BYTES:body_end])
            check_body(header, memoryview(body))
            message = decode_body(header.opcode, Flag.REPLY in header.flags, memoryview(body))
        except LocalProtocolError as exc:
            raise Finding(f"the gateway sends what is no frame: {exc}") from None
        if sum(payload_lengths(message)) != header.payload_bytes:
            raise Finding(f"a payload of {header.payload_bytes} bytes for {payload_lengths(message)}")
        payload = bytes(self._heard[body_end:end])
        del self._heard[:end]
        return header, message, payload

    def _max_sizes(self) -> tuple[int, int]:
        if self.welcome is None or self._hello is None:
            return HANDSHAKE_BODY_BYTES, 0
        return self._hello.max_body_bytes, self._hello.max_payload_bytes

    def _take(self, header: FrameHeader, message: Message, payload: bytes) -> None:
        number, is_final = header.request_id, Flag.MORE not in header.flags
        if self.error is not None:
            raise Finding("a frame behind ERROR")
        if Flag.REPLY in header.flags and not isinstance(message, Welcome):
            self._take_reply(number, message, is_final, payload)  # type: ignore[arg-type]
            return
        if number or not is_final:
            raise Finding(f"{header.opcode.name} from the gateway with id {number}, final: {is_final}")
        match message:
            case ErrorMessage():
                self.error = message
                self._model.end_leases(self)
            case Welcome():
                self._take_welcome(message)
            case Goodbye() | Credit():
                self.is_draining |= isinstance(message, Goodbye)
                if self._core.state is State.OPEN:  # else it may have crossed what we said
                    self._as_its_own(message)
            case _:
                raise Finding(f"a gateway does not send {header.opcode.name}")

    def _take_welcome(self, welcome: Welcome) -> None:
        hello = self._hello
        if self.welcome is not None or hello is None:
            raise Finding("a WELCOME that nobody asked for")
        if welcome.features & ~hello.features:
            raise Finding(f"WELCOME has features that HELLO had not: {welcome.features & ~hello.features!r}")
        if not hello.min_version <= welcome.version <= hello.max_version:
            raise Finding(f"WELCOME chooses version {welcome.version}")
        self._was_early = self.is_early
        self.welcome = welcome
        self._core.accept(welcome)
        held, self._held = self._held, b""
        self._pump()  # what came together with HELLO
        self.sent(held)

    def _as_its_own(self, message: Goodbye | Credit) -> None:
        try:
            self._core.notice(message)
        except LocalProtocolError as exc:
            raise Finding(f"a notice that the spec forbids: {exc}") from None

    def _take_reply(self, number: int, reply: Reply, is_final: bool, payload: bytes) -> None:
        asked = self._asked.get(number)
        if asked is None:
            if self.violation is not None and not self.is_certain:
                return
            raise Finding(f"a reply to request {number}, which is not open: {_brief(reply)}")
        if self.violation is None and not self._has_quit:
            try:
                self._core.reply(number, reply, is_final=is_final)
            except LocalProtocolError as exc:
                raise Finding(f"{asked.name}: an answer that the spec forbids: {exc}") from None
        match reply:
            case Pong():
                assert isinstance(asked.message, Ping)
                if reply.nonce != asked.message.nonce:
                    raise Finding(f"{asked.name}: nonce {reply.nonce} instead of {asked.message.nonce}")
            case GoodbyeReply():
                self.is_left = True
                self.ended()
            case ReadReply(status=ErrorCode.OK, items=items):
                self._judge_items(asked, items, payload)
            case StatusReply(status=ErrorCode.OK) | ExistReply(status=ErrorCode.OK):
                self._judge_statuses(asked, reply)
            case StatusReply() | ExistReply() | ReadReply():
                self._refused(asked, reply)
            case _:
                raise Finding(f"{asked.name}: {_brief(reply)}")
        if is_final:
            self._finish(asked)

    def _refused(self, asked: _Asked, reply: StatusReply | ExistReply | ReadReply) -> None:
        _forbid(asked, reply.status, (ErrorCode.GATEWAY_FAULT, ErrorCode.OK))
        self.statuses.append(reply.status)
        for index in range(len(asked.versions)):
            asked.outcomes[index] = reply.status

    def _judge_statuses(self, asked: _Asked, reply: StatusReply | ExistReply) -> None:
        present: set[Subject] = set()
        for index, status in enumerate(reply.statuses, reply.first):
            code = ErrorCode(status)
            self.statuses.append(code)
            asked.outcomes[index] = code
            if isinstance(asked.message, Write):
                self._judge_write(asked, asked.versions[index], code)
                continue
            if isinstance(asked.message, (Exist, Delete)):
                _forbid(asked, code, _NEITHER_THERE_NOR_NOT)
            elif isinstance(asked.message, Check):
                _forbid(asked, code, _NEITHER_THERE_NOR_NOT - {ErrorCode.CORRUPT})
            else:
                _forbid(asked, code, (ErrorCode.GATEWAY_FAULT,))
                continue
            subject = asked.subjects[index]
            if code is ErrorCode.OK:
                self._model.check_there(subject, asked.moment, asked.name)
                present.add(subject)
            elif code is ErrorCode.CORRUPT:
                self._model.damaged.add(subject)
            elif not isinstance(asked.message, Delete):
                self._model.check_missing(subject, asked.moment)
        if isinstance(reply, ExistReply) and (reply.lease_id or reply.lease_ms):
            self._lease(asked, reply, present)

    def _judge_write(self, asked: _Asked, version: Version, code: ErrorCode) -> None:
        _forbid(asked, code, (ErrorCode.GATEWAY_FAULT, ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH))
        if code is ErrorCode.OK and not version.is_whole:
            raise Finding(f"{asked.name}: OK for an object whose bytes do not match its checksum")
        if code is ErrorCode.CORRUPT and version.is_whole:
            raise Finding(f"{asked.name}: CORRUPT for an object whose bytes match its checksum")
        assert self.welcome is not None
        if code is ErrorCode.TOO_LARGE and version.object_bytes <= self.welcome.limits.max_object_bytes:
            raise Finding(
                f"{asked.name}: TOO_LARGE for {version.object_bytes} bytes, which is below the limit"
            )

    def _lease(self, asked: _Asked, reply: ExistReply, present: set[Subject]) -> None:
        assert isinstance(asked.message, Exist)
        assert self.welcome is not None
        most = min(asked.message.lease_ms, self.welcome.limits.max_lease_ms)
        if reply.lease_ms > most or not asked.message.lease_ms:
            raise Finding(f"{asked.name}: a lease of {reply.lease_ms} ms, when at most {most} may be granted")
        self._model.leases[reply.lease_id] = Lease(
            connection=self,
            subjects=frozenset(present),
            granted=self._model.tick(),
            ends=asked.asked_at + reply.lease_ms / 1000,
        )

    def releasing(self, lease_ids: Iterable[int]) -> None:
        """A RELEASE is about to go out: nothing is promised from now on."""
        for lease_id in lease_ids:
            self._model.leases.pop(lease_id, None)

    def _judge_items(self, asked: _Asked, items: Iterable[ReadItem], payload: bytes) -> None:
        assert isinstance(asked.message, Read)
        at = 0
        for item in items:
            part = payload[at : at + item.length]
            at += item.length
            if item.status is ErrorCode.OK:
                whole = asked.halves.setdefault(item.index, bytearray())
                whole += part
                if len(whole) < item.object_bytes:
                    continue
                data = bytes(asked.halves.pop(item.index))
                self._model.check_bytes(asked.subjects[item.index], asked.moment, data, item.checksum)
            else:
                self._judge_miss(asked, asked.message, item)
            self.statuses.append(item.status)
            asked.outcomes[item.index] = item.status

    def _judge_miss(self, asked: _Asked, message: Read, item: ReadItem) -> None:
        subject = asked.subjects[item.index]
        asked.halves.pop(item.index, None)
        if item.status is ErrorCode.CORRUPT:
            self._model.damaged.add(subject)
        elif item.status is ErrorCode.NOT_FOUND:
            self._model.check_missing(subject, asked.moment)
        elif item.status is ErrorCode.TOO_LARGE:
            versions = self._model.possible(subject, asked.moment)
            room = message.capacities[item.index]
            if not any(v.object_bytes == item.object_bytes for v in versions):
                raise Finding(f"{asked.name}: TOO_LARGE with {item.object_bytes} bytes, which no object has")
            if item.object_bytes <= room and self._max_sizes()[1]:
                raise Finding(f"{asked.name}: TOO_LARGE with {item.object_bytes} bytes, and room for {room}")
        else:
            _forbid(asked, item.status, _NEITHER_THERE_NOR_NOT - {ErrorCode.OVERLOADED})

    def _finish(self, asked: _Asked) -> None:
        """The final answer is in."""
        del self._asked[asked.request_id]
        asked.moment.finished = self._model.tick()
        for index, version in enumerate(asked.versions):
            version.is_stored = asked.outcomes.get(index) == ErrorCode.OK
        for index, removal in enumerate(asked.removals):
            removal.is_done = index in asked.outcomes


def _forbid(asked: _Asked, code: ErrorCode, codes: Iterable[ErrorCode]) -> None:
    if code in codes:
        raise Finding(f"{asked.name}: {code.name}, which has no place there")


def _brief(message: object) -> str:
    text = repr(message)
    return text if len(text) <= 200 else f"{text[:200]}..."


def features_of(welcome: Welcome) -> list[str]:
    """For people."""
    return [feature.name or "" for feature in Feature if feature in welcome.features]


def limits_of(welcome: Welcome) -> dict[str, int]:
    """For people, and for the case file."""
    return attrs.asdict(welcome.limits)
