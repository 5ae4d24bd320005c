"""Who goes first: two queues of segments, a mark on what was read, a memory of what left. Pure: decides only.

A policy of the S3-FIFO class (docs/adr/0016 has the reasons and the numbers), for a log that gives up whole
segments:

* New objects are on **probation**: about `PROBATION_SHARE` of what is stored, oldest segment first. While it
  is above its share it pays for what is new; so a scan pushes out itself. Below, the **main** queue pays.
* A read marks an object. When a segment's turn comes, what is marked survives and loses its mark. If that is
  `KEPT_SHARE` of the segment or more, the segment stays as it is, at the end of the main queue: nothing is
  written. Otherwise what survives is written again, among what is new.
* Keys that were evicted are remembered for a while as **ghosts**. An object whose key is one begins with a
  mark, as if it had been read: it left too early once. So agents that come back later than a probation lasts
  lose their history once, not every time.

Nothing of this is on the device. After a restart all segments are on probation, in the order of their age;
agents' reads sort them anew, which costs them less than a hundredth of their hits.
"""

import enum
from array import array
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

import attrs
import xxhash

PROBATION_SHARE: Final = 0.4
KEPT_SHARE: Final = 0.35

#: Segments that one search keeps at most: looking at a segment takes a moment, and the event loop waits.
MOST_KEPT: Final = 16

_SLOT_BYTES = array("I").itemsize
_BYTES_PER_SLOT = 131072  # of capacity: a ghost for every object, if objects have that much on average
_FEWEST_SLOTS, _MOST_SLOTS = 1024, 4 << 20


class Queue(enum.Enum):
    """Where a segment stands."""

    PROBATION = "probation"
    MAIN = "main"


class Queued(Protocol):
    """What a policy sees of a segment, and the two fields that are the policy's to write."""

    queue: Queue
    turn: int  # when it was last kept; 0: never since the store was opened

    @property
    def charge_bytes(self) -> int:
        """What it counts for."""
        ...


_Q = TypeVar("_Q", bound=Queued)


class EvictionPolicy(Protocol):
    """What the store asks when it needs room, and what it tells. Every call returns at once."""

    def order(self, segments: Iterable[_Q]) -> list[_Q]:
        """All of `segments`, which come in the order of their age, in the order in which they should go."""
        ...

    def is_kept(self, segment: Queued, marked_bytes: int) -> bool:
        """Whether a segment whose turn it is stays as it is, with so many bytes of marked objects in it."""
        ...

    def keep(self, segment: Queued) -> None:
        """It stays. The caller takes the marks of its objects."""
        ...

    def returned(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Which objects, just stored, begin with a mark. Asked once for each."""
        ...

    def evicted(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Objects have been evicted."""
        ...


class Ghosts:
    """Which keys left lately, in a fixed number of bytes.

    One 32-bit fingerprint a slot, and a newer one replaces what stands in its slot; so a ghost is forgotten
    after about `slots` evictions. Fingerprints are of a hash with a secret seed. Two keys may share one: then
    an object begins with marks that it has not earned, which costs room for a while, and nothing else.
    """

    def __init__(self, slots: int, *, seed: int) -> None:
        self._seed = seed
        self._fingerprints = array("I", bytes(_SLOT_BYTES)) * slots  # 0: none

    @property
    def memory_bytes(self) -> int:
        """What this takes, however many ghosts there are."""
        return len(self._fingerprints) * _SLOT_BYTES

    def add(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Remember keys."""
        fingerprints, slots, seed = self._fingerprints, len(self._fingerprints), self._seed
        for key in keys:
            digest = xxhash.xxh3_64_intdigest(namespace + key, seed)
            fingerprints[(digest & 0xFFFFFFFF) % slots] = digest >> 32 or 1

    def take(self, namespace: bytes, key: bytes) -> bool:
        """Whether the key is remembered; it is not from now on."""
        digest = xxhash.xxh3_64_intdigest(namespace + key, self._seed)
        slot = (digest & 0xFFFFFFFF) % len(self._fingerprints)
        if self._fingerprints[slot] != (digest >> 32 or 1):
            return False
        self._fingerprints[slot] = 0
        return True


@attrs.define(eq=False)
class TwoQueues:
    """The policy that the head of this module describes."""

    _ghosts: Ghosts
    probation_share: float = attrs.field(default=PROBATION_SHARE, kw_only=True)
    kept_share: float = attrs.field(default=KEPT_SHARE, kw_only=True)
    _clock: int = attrs.field(default=0, init=False)

    def order(self, segments: Iterable[_Q]) -> list[_Q]:
        """The queue that has to pay, oldest first, and then the other."""
        probation: list[_Q] = []
        main: list[_Q] = []
        for segment in segments:
            (main if segment.queue is Queue.MAIN else probation).append(segment)
        main.sort(key=lambda segment: segment.turn)
        small, large = (sum(segment.charge_bytes for segment in queue) for queue in (probation, main))
        return probation + main if small > self.probation_share * (small + large) else main + probation

    def is_kept(self, segment: Queued, marked_bytes: int) -> bool:
        """If enough of it is marked."""
        return marked_bytes >= self.kept_share * segment.charge_bytes

    def keep(self, segment: Queued) -> None:
        """To the end of the main queue."""
        self._clock += 1
        segment.queue, segment.turn = Queue.MAIN, self._clock

    def returned(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """Those that have been here before."""
        take = self._ghosts.take
        return [take(namespace, key) for key in keys]

    def evicted(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Remember them."""
        self._ghosts.add(namespace, keys)


def ghost_slots(capacity_bytes: int) -> int:
    """How many ghosts a store of so many bytes may have: 32 bytes of memory for each MiB, at most 16 MiB."""
    return min(max(capacity_bytes // _BYTES_PER_SLOT, _FEWEST_SLOTS), _MOST_SLOTS)
