"""What became of requests, by verb: taken, answered, how each of their items went, how long it took.

It stands beside every request of every connection, so it only adds to integers: no labels, no locks, no
objects but one tuple for each request that is open. `metrics` turns it into series when somebody looks.
"""

import time
from collections.abc import Callable, Mapping
from math import frexp

import attrs

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    Ping,
    Read,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    Release,
    Reply,
    Request,
    StatusReply,
    Write,
    WriteRegion,
)

NAMES: Mapping[type, str] = {
    Exist: "exist",
    Read: "read",
    ReadRegion: "read_region",
    Write: "write",
    WriteRegion: "write_region",
    Delete: "delete",
    Check: "check",
    Release: "release",
    Fence: "fence",
    Ping: "ping",
    Goodbye: "goodbye",
    RegionOpen: "region_open",
    RegionClose: "region_close",
}
_STATUSES = 1 + max(code for code in ErrorCode if not code.ends_connection)
FASTEST_EXPONENT = -30  # 2**-30 seconds are a nanosecond
_BINS = 54  # 2**23 seconds are three months: no request lives as long


@attrs.define
class Verb:
    """The counts of one verb. A list by status has a place for each `ErrorCode` that can answer.

    latencies: at `n - FASTEST_EXPONENT`, how many took less than 2**n seconds and not less than half of that.
    """

    taken: int = 0
    abandoned: int = 0  # their connection ended first
    answered: list[int] = attrs.field(factory=lambda: [0] * _STATUSES)
    items: list[int] = attrs.field(factory=lambda: [0] * _STATUSES)
    latencies: list[int] = attrs.field(factory=lambda: [0] * _BINS)
    latency_seconds: float = 0.0

    @property
    def in_flight(self) -> int:
        """Requests that are open now."""
        return self.taken - self.abandoned - sum(self.answered)

    def count(self, statuses: bytes) -> None:
        """Items that have been answered with these."""
        good = statuses.count(0)
        self.items[0] += good
        if good != len(statuses):
            for status in set(statuses):
                if status:
                    self.items[status] += statuses.count(status)


def new_verbs() -> dict[type, Verb]:
    """Every verb, by the class of its requests, at nothing."""
    return {kind: Verb() for kind in NAMES}


class Meter:
    """The requests of one connection. What it counts goes to `verbs`, which all connections share."""

    def __init__(self, verbs: Mapping[type, Verb], *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._verbs = verbs
        self._clock = clock
        self._open: dict[int, tuple[Verb, float]] = {}

    def begin(self, request_id: int, message: Request) -> None:
        """A request has been taken; one of several frames counts from the first."""
        verb = self._verbs[type(message)]
        verb.taken += 1
        self._open[request_id] = (verb, self._clock())

    def reply(self, request_id: int, reply: Reply, is_final: bool, unanswered: int = 0) -> None:
        """A reply goes out. `unanswered`: how many items it speaks for without a status of their own."""
        status = 0
        if isinstance(reply, (StatusReply, ExistReply)):
            status, statuses = reply.status, reply.statuses
        elif isinstance(reply, (ReadReply, ReadRegionReply)):
            status, statuses = reply.status, reply.items.statuses
        else:
            statuses = b""
        if is_final:
            verb, began = self._open.pop(request_id)
            seconds = self._clock() - began
            verb.latency_seconds += seconds
            verb.latencies[frexp(seconds + 1e-9)[1] - FASTEST_EXPONENT] += 1
            verb.answered[status] += 1
        else:
            verb, _ = self._open[request_id]
        if statuses:
            verb.count(statuses)
            if isinstance(reply, ReadReply) and not statuses[-1]:
                # Of an object that goes on in the next frame only the end counts: the last of its frame.
                items = reply.items
                verb.items[0] -= items.offsets[-1] + items.lengths[-1] < items.object_bytes[-1]
        if unanswered:
            verb.items[status] += unanswered

    def leave(self) -> None:
        """The connection is gone, and with it what had not been answered. Idempotent."""
        for verb, _ in self._open.values():
            verb.abandoned += 1
        self._open.clear()
