"""What a link or a session needs from a byte stream, and nothing more.

One task receives and one task sends; the two may run at the same time. Two tasks in the same direction is a
bug of the caller, and implementations say so (anyio.BusyResourceError) instead of interleaving bytes.

Errors of the stream are OSError. Translating them into the client's vocabulary is the link's business.
"""

import enum
from collections.abc import Callable, MutableSequence, Sequence
from typing import Protocol, TypeAlias, cast

import attrs


@attrs.frozen
class FileRange:
    """Bytes `[offset, offset + length)` of an open file, to be sent without passing through this process."""

    fd: int
    offset: int
    length: int


Part: TypeAlias = bytes | bytearray | memoryview | FileRange

Progress: TypeAlias = Callable[[int], None]


class Transport(Protocol):
    """A connected, ordered, reliable stream of bytes."""

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """Receive what is there, at least one byte, into `buffers` in order; returns how many. 0: the end.

        Cancellation: nothing has been received if Cancelled is raised.
        """
        ...

    async def receive_exactly(self, buffers: Sequence[memoryview], progress: Progress | None = None) -> None:
        """Fill all of `buffers`. Raises EOFError if the stream ends first.

        `progress(n)` is told each time that n more bytes are in, in the thread that received them and while
        they are still in that core's cache: the place to make a checksum.

        Cancellation aborts the stream if bytes have been taken from it. In every case, when this returns or
        raises, no byte of `buffers` is written any more.
        """
        ...

    async def send(self, parts: Sequence[Part]) -> None:
        """Send all bytes of all `parts`, in order: memory, or ranges of files.

        Cancellation aborts the stream if bytes have been sent (a half frame must not be followed by
        anything). In every case, when this returns or raises, no byte of `parts` is read any more.
        """
        ...

    async def send_file(self, fd: int, offset: int, length: int) -> None:
        """`send` of one FileRange."""
        ...

    def abort(self) -> None:
        """End both directions now. Idempotent, never waits; whoever waits in a method above is woken."""
        ...

    async def aclose(self) -> None:
        """Abort, and give back what the stream holds once nobody is inside. Idempotent."""
        ...


class Half(enum.Enum):
    """One direction of a stream, seen from this side."""

    RECEIVING = "receiving"
    SENDING = "sending"


class LocalTransport(Transport, Protocol):
    """A Transport within one host: descriptors travel along, and its end can be made to prove something.

    Two processes that share memory need to know when the other has stopped to use it. The end of the stream
    says so, if whoever uses the memory closes last of all, and whoever waits for it can still hear: that is
    what `abort_only` and `wait_peer_closed` are for.
    """

    @property
    def carries_descriptors(self) -> bool:
        """Whether this very stream does (a TCP socket does not)."""
        ...

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """`send`, with a descriptor that the other side gets a copy of together with the first byte."""
        ...

    async def receive_with_descriptors(
        self, buffers: Sequence[memoryview], descriptors: MutableSequence[int | None]
    ) -> int:
        """`receive_some`, and the descriptors that came along are appended to `descriptors`; who calls owns
        them, also if this raises. None stands for one that could not be received. All other ways to receive
        close descriptors."""
        ...

    def abort_only(self, half: Half) -> None:
        """From now on `abort` ends only that half, as far as the other side can see; the rest ends with
        `aclose`. SENDING: the end of the other side can still be waited for. RECEIVING: the other side sees
        no end before `aclose`."""
        ...

    async def wait_peer_closed(self) -> None:
        """After `abort`, nobody inside: throw away what still comes, and return when the other side has
        closed."""
        ...


def local_transport(transport: Transport) -> LocalTransport | None:
    """`transport`, if descriptors can travel along."""
    return cast(LocalTransport, transport) if getattr(transport, "carries_descriptors", False) else None
