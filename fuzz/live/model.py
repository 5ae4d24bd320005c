"""Which bytes an object may have, given all that was asked and all that was answered.

A miss is always right, so the model says only what must *not* be: bytes that were never written under that
name, bytes that failed to be stored, and bytes that something finished has replaced or deleted. Time is a
counter of what this process has sent and heard; what is not ordered by it, nor by a FENCE, may have happened
either way.
"""

import time
from collections.abc import Iterator

import attrs
import xxhash

Subject = tuple[bytes, bytes]


class Finding(Exception):
    """The gateway has done what it must not. `is_old`: it may be due to what was done to it before."""

    def __init__(self, text: str, *, is_old: bool = False) -> None:
        super().__init__(text)
        self.is_old = is_old


@attrs.define(eq=False, kw_only=True)
class Moment:
    """When something was asked: the counter, the connection, and the FENCEs before it on that connection."""

    sent: int
    connection: object
    era: int
    finished: int | None = None  # when its final answer was heard

    def is_before(self, other: "Moment") -> bool:
        """Whether this was certainly over when `other` began."""
        if self.finished is not None and self.finished < other.sent:
            return True
        return self.connection is other.connection and self.era < other.era


@attrs.define(eq=False, kw_only=True)
class Version:
    """Bytes that a WRITE gave, or is still giving, to a key."""

    moment: Moment
    object_bytes: int
    checksum: int
    parts: list[bytearray] = attrs.field(factory=list)
    is_stored: bool | None = None  # None: nobody has said

    @property
    def is_whole(self) -> bool:
        """Whether the bytes are what the checksum speaks of: else they must never be stored."""
        data = self.data
        return len(data) == self.object_bytes and xxhash.xxh3_64_intdigest(data) == self.checksum

    @property
    def data(self) -> bytes:
        """What has been sent of it."""
        return b"".join(self.parts)


@attrs.define(eq=False, kw_only=True)
class Removal:
    """A DELETE of a key. Whether it was there or not: it is not, from then on."""

    moment: Moment
    is_done: bool = False


@attrs.define(eq=False, kw_only=True)
class Lease:
    """What EXIST promised to keep."""

    connection: object
    subjects: frozenset[Subject]
    granted: int  # the counter when that was heard
    ends: float  # on the monotonic clock; not later than the gateway's own end of it


@attrs.define
class Model:
    """All objects of some namespaces."""

    versions: dict[Subject, list[Version]] = attrs.field(factory=dict)
    removals: dict[Subject, list[Removal]] = attrs.field(factory=dict)
    damaged: set[Subject] = attrs.field(factory=set)  # the gateway said CORRUPT: nothing is promised any more
    leases: dict[int, Lease] = attrs.field(factory=dict)
    _tick: int = 0

    def tick(self) -> int:
        """The next number of the counter."""
        self._tick += 1
        return self._tick

    def possible(self, subject: Subject, reader: Moment) -> Iterator[Version]:
        """What `reader` may find under this name."""
        for version in self.versions.get(subject, ()):
            if version.is_stored is not False and not self._is_gone(subject, version, reader):
                yield version

    def _is_gone(self, subject: Subject, version: Version, reader: Moment) -> bool:
        later = [other.moment for other in self.versions.get(subject, ()) if other.is_stored]
        later += [removal.moment for removal in self.removals.get(subject, ()) if removal.is_done]
        return any(version.moment.is_before(each) and each.is_before(reader) for each in later)

    def check_bytes(self, subject: Subject, reader: Moment, data: bytes, checksum: int) -> None:
        """Raise Finding unless a read may have found these bytes."""
        if xxhash.xxh3_64_intdigest(data) != checksum:
            raise Finding(f"{_name(subject)}: bytes that do not match their checksum")
        if any(v.checksum == checksum and v.data == data for v in self.possible(subject, reader)):
            return
        for version in self.versions.get(subject, ()):
            if version.data == data:
                was = "refused" if version.is_stored is False else "replaced or deleted"
                raise Finding(f"{_name(subject)}: bytes that were {was} before the read was asked")
        others = [
            other
            for other, versions in self.versions.items()
            if any(version.data == data for version in versions)
        ]
        whose = f"those of {_name(others[0])}" if others else "nobody's"
        raise Finding(f"{_name(subject)}: wrong bytes, {whose}")

    def check_there(self, subject: Subject, reader: Moment, verb: str) -> None:
        """Raise Finding unless an object may be there."""
        if not any(version.is_whole for version in self.possible(subject, reader)):
            raise Finding(f"{_name(subject)}: {verb} says OK, and there can be nothing")

    def check_missing(self, subject: Subject, reader: Moment) -> None:
        """Raise Finding if a lease promised that the object is there."""
        now = time.monotonic()
        if self.removals.get(subject) or subject in self.damaged:
            return
        for lease in self.leases.values():
            if subject in lease.subjects and reader.sent > lease.granted and now < lease.ends:
                raise Finding(f"{_name(subject)}: a miss under a lease")

    @property
    def lease_seconds_left(self) -> float:
        """Until the last lease ends by itself."""
        return max(0.0, max((lease.ends for lease in self.leases.values()), default=0.0) - time.monotonic())

    def end_leases(self, connection: object) -> None:
        """The connection gives them back, or ends."""
        self.leases = {
            number: lease for number, lease in self.leases.items() if lease.connection is not connection
        }


def _name(subject: Subject) -> str:
    namespace, key = subject
    shown = key.hex() if len(key) <= 20 else f"{key[:20].hex()}... ({len(key)} bytes)"
    return f"object {namespace[:4].hex()}/{shown}"
