"""What one connection has to send: the queue behind its one writer task.

Two lanes. Short replies (statuses, EXIST, PONG) go first. Frames with objects, and replies that must not
overtake them, go in turn; whoever makes them waits while `max_queued_bytes` are queued. Nobody waits to put a
short reply, but the session takes no more requests while MAX_REPLY_BYTES of them wait (`wait_taken`). So a
slow reader makes nothing pile up. A frame owns the leases of its objects from `put` on, and releases them
when it has been sent or will never be.
"""

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.lowlevel
import attrs

from adp_client.transport import Transport
from adp_client.transport.base import Part

#: Frames go out together up to this size, so that small ones cost less; short replies wait meanwhile.
TOGETHER_BYTES = 1 << 20


#: Replies and heads of frames that may wait for the peer to take them before it is read from no more.
MAX_REPLY_BYTES = 4 << 20
FRAME_OVERHEAD_BYTES = 96  # what a queued frame keeps beside its bytes


class Releasable(Protocol):
    """Something a frame keeps until it has been sent."""

    def release(self) -> None:
        """Give it back; idempotent."""
        ...


@attrs.define(eq=False)
class Frame:
    """One frame: its encoded header and body, then ranges of files.

    `reads` is what the ranges belong to; `owned` are those of them that end with this frame.
    """

    parts: Sequence[Part]
    payload_bytes: int = 0
    owned: Sequence[Releasable] = ()
    reads: Sequence[Releasable] = ()

    @property
    def head_bytes(self) -> int:
        """What it keeps in memory itself."""
        return FRAME_OVERHEAD_BYTES + sum(len(part) for part in self.parts if isinstance(part, bytes))

    def release(self) -> None:
        """It has been sent, or never will be."""
        owned, self.owned = self.owned, ()
        for each in owned:
            each.release()


def _kept_bytes(frames: Sequence[bytes]) -> int:
    """What short replies keep in memory while they wait."""
    return sum(map(len, frames)) + FRAME_OVERHEAD_BYTES * len(frames)


class Outbox:
    """Two lanes and their writer."""

    def __init__(self, *, max_queued_bytes: int, send_seconds: float) -> None:
        self._max_queued_bytes = max_queued_bytes
        self._send_seconds = send_seconds
        self._prompt: list[bytes] = []
        self._in_turn: deque[Frame] = deque()
        self._queued_bytes = 0
        self._reply_bytes = 0  # of short replies and heads, until the peer has taken them
        self._under_way: list[Frame] = []
        self._is_sending = False
        self._is_finishing = False
        self._is_closed = False
        self._wake = anyio.Event()
        self._room = anyio.Event()
        self._empty = anyio.Event()

    @property
    def is_empty(self) -> bool:
        """Everything that was put has been handed to the socket."""
        return not (self._prompt or self._in_turn or self._is_sending)

    @property
    def queued_bytes(self) -> int:
        """Payload that waits or is being sent."""
        return self._queued_bytes

    def put_prompt(self, frame: bytes) -> None:
        """Send this whole frame as soon as the one under way is out."""
        self._prompt.append(frame)
        self._reply_bytes += _kept_bytes([frame])
        self._wake.set()

    def put_in_turn(self, frame: Frame) -> None:
        """Send this after everything put in turn before. Does not wait; for frames without objects."""
        if self._is_closed:
            frame.release()
            return
        self._in_turn.append(frame)
        self._queued_bytes += frame.payload_bytes
        self._reply_bytes += frame.head_bytes
        self._wake.set()

    async def put(self, frame: Frame) -> None:
        """`put_in_turn` when there is room. The frame is released in every case, sooner or later."""
        try:
            while self._queued_bytes and self._queued_bytes + frame.payload_bytes > self._max_queued_bytes:
                await self._room.wait()
            await anyio.lowlevel.checkpoint()  # who has many frames to put keeps nobody else waiting
        except BaseException:
            frame.release()
            raise
        self.put_in_turn(frame)

    def finish(self, last: bytes | None = None) -> None:
        """Nothing more will be put: `run` returns when all is sent.

        With `last`, what is queued is dropped: the frame under way is finished, `last` follows, that is all.
        """
        if last is not None:
            self._drop()
            self.put_prompt(last)
        self._is_finishing = True
        self._wake.set()

    async def wait_taken(self) -> None:
        """Return when the peer has taken so many of its answers that it may be asked for more requests."""
        while self._reply_bytes > MAX_REPLY_BYTES:
            await self._room.wait()

    async def wait_empty(self) -> None:
        """Return when everything that was put has been handed to the socket."""
        while not self.is_empty:
            await self._empty.wait()

    async def run(self, transport: Transport) -> None:
        """The writer task: send until `finish`.

        Raises OSError or EOFError when the stream or a file fails; TimeoutError, which is an OSError, when
        the peer does not take one frame in `send_seconds`. A frame may be half sent then, and what was queued
        is kept for `reads` until `close`.
        """
        try:
            while True:
                if self._prompt:
                    prompt, self._prompt = self._prompt, []
                    self._is_sending = True
                    await self._send(transport, prompt)
                    self._made_room(0, _kept_bytes(prompt))
                elif self._in_turn:
                    frames = self._next_frames()
                    self._is_sending = True
                    self._under_way = frames
                    await self._send(transport, [part for frame in frames for part in frame.parts])
                    self._release_under_way()
                elif self._is_finishing:
                    return
                else:
                    self._wake = anyio.Event()
                    await self._wake.wait()
                self._is_sending = False
                if self.is_empty:
                    self._empty.set()
                    self._empty = anyio.Event()
        finally:
            self._is_closed = True

    @property
    def reads(self) -> list[Releasable]:
        """What is being read from files now, or will be; what `run` left when it raised, until `close`."""
        return [each for frame in (*self._under_way, *self._in_turn) for each in frame.reads]

    def _release_under_way(self) -> None:
        frames, self._under_way = self._under_way, []
        for frame in frames:
            frame.release()
        self._made_room(
            sum(frame.payload_bytes for frame in frames), sum(frame.head_bytes for frame in frames)
        )

    def _next_frames(self) -> list[Frame]:
        """What goes out in one call: one frame, or several small ones."""
        frames = [self._in_turn.popleft()]
        size_bytes = frames[0].payload_bytes
        while self._in_turn and size_bytes + self._in_turn[0].payload_bytes <= TOGETHER_BYTES:
            frames.append(self._in_turn.popleft())
            size_bytes += frames[-1].payload_bytes
        return frames

    async def _send(self, transport: Transport, parts: Sequence[Part]) -> None:
        with anyio.fail_after(self._send_seconds):
            await transport.send(parts)

    def close(self) -> None:
        """Drop what has not been sent, and whatever is put from now on."""
        self._is_closed = True
        self._drop()
        self._release_under_way()

    def _drop(self) -> None:
        self._made_room(0, _kept_bytes(self._prompt))
        self._prompt.clear()
        while self._in_turn:
            frame = self._in_turn.popleft()
            frame.release()
            self._made_room(frame.payload_bytes, frame.head_bytes)

    def _made_room(self, payload_bytes: int, reply_bytes: int) -> None:
        self._queued_bytes -= payload_bytes
        self._reply_bytes -= reply_bytes
        self._room.set()
        self._room = anyio.Event()
