"""What the core tells its owner (returned by `Connection.next_event`)."""

from typing import TypeAlias

import attrs

from .messages import Hello, Message, Notice, Reply, Request, Welcome


@attrs.frozen(kw_only=True)
class HelloReceived:
    """Gateway: a client speaks. Answer with `accept` or `refuse`."""

    hello: Hello


@attrs.frozen(kw_only=True)
class Opened:
    """Client: the handshake is done; requests may go out."""

    welcome: Welcome


@attrs.frozen(kw_only=True)
class PayloadExpected:
    """A frame's body is in and `lengths` bytes of payload follow, one entry per item of `message`.

    Nothing more is parsed until the owner calls `Connection.accept_payload` with memory for them. The
    matching RequestReceived or ReplyReceived comes when the last byte is in.
    """

    request_id: int
    message: Message
    lengths: tuple[int, ...]
    is_final: bool


@attrs.frozen(kw_only=True)
class RequestReceived:
    """Gateway: one frame of a request, payload included. `is_final`: the request is complete."""

    request_id: int
    message: Request
    is_final: bool


@attrs.frozen(kw_only=True)
class ReplyReceived:
    """Client: one frame of a reply, payload included. `is_final`: its request id is free again."""

    request_id: int
    message: Reply
    is_final: bool


@attrs.frozen(kw_only=True)
class NoticeReceived:
    """Something the peer says unasked: it drains, it changes the window, or it closes with a reason."""

    notice: Notice


@attrs.frozen(kw_only=True)
class RequestExpired:
    """Client: the deadline of this request passed without its final reply. Told once."""

    request_id: int


@attrs.frozen(kw_only=True)
class PeerClosed:
    """The peer's bytes have ended. `is_clean`: between frames, with nothing owed to this side."""

    is_clean: bool


Event: TypeAlias = (
    HelloReceived
    | Opened
    | PayloadExpected
    | RequestReceived
    | ReplyReceived
    | NoticeReceived
    | RequestExpired
    | PeerClosed
)
