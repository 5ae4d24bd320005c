"""The workers of one gateway, as each of them tells in WELCOME (spec section 4.5).

The extension WORKERS:

     16 bytes gateway id | u16 workers | u16 this worker | u32 0 | places
     place: u16 port | u16 name bytes | name

A place is a port on the host that the client has dialled or, over a Unix socket, the name of another socket
in the directory of the one that it has dialled. Both stay true where a network or a container gives the
gateway another name than it knows.
"""

import struct
from collections.abc import Iterable

import attrs

from .constants import GATEWAY_ID_BYTES, MAX_PLACE_NAME_BYTES, MAX_WORKERS, WORKERS_EXTENSION
from .errors import LocalProtocolError
from .messages import Extension

_HEAD = struct.Struct("<16sHHI")
_PLACE = struct.Struct("<HH")
assert _HEAD.size == 24
assert _PLACE.size == 4


@attrs.frozen(kw_only=True)
class Place:
    """Where a worker can be dialled: a port, or the name of a socket's file. One of the two."""

    port: int = 0
    name: str = ""


@attrs.frozen(kw_only=True)
class WorkerMap:
    """Who keeps which objects, as one of the workers says. Equal if it says the same, whoever says it."""

    gateway_id: bytes
    places: tuple[Place, ...]
    worker: int = attrs.field(eq=False)  # who says it

    @property
    def count(self) -> int:
        """How many workers there are."""
        return len(self.places)


def encode_worker_map(told: WorkerMap) -> Extension:
    """The extension for WELCOME. Raises LocalProtocolError for a map that no client would take."""
    rows = [(place.port, place.name.encode()) for place in told.places]
    data = _HEAD.pack(told.gateway_id, told.count, told.worker, 0)
    data += b"".join(_PLACE.pack(port, len(name)) + name for port, name in rows)
    _decode(data)
    return Extension(tag=WORKERS_EXTENSION, data=data)


def decode_worker_map(extensions: Iterable[Extension]) -> WorkerMap | None:
    """What WELCOME says of workers; None for a gateway that is one. Raises LocalProtocolError."""
    found = [extension.data for extension in extensions if extension.tag == WORKERS_EXTENSION]
    if not found:
        return None
    if len(found) > 1:
        raise LocalProtocolError("WORKERS stands there twice")
    return _decode(found[0])


def _decode(data: bytes) -> WorkerMap:
    if len(data) < _HEAD.size:
        raise LocalProtocolError(f"WORKERS of {len(data)} bytes")
    gateway_id, count, worker, reserved = _HEAD.unpack_from(data)
    if reserved:
        raise LocalProtocolError("a reserved field is not zero")
    if not 2 <= count <= MAX_WORKERS or worker >= count:
        raise LocalProtocolError(f"worker {worker} of {count}")
    at, places = _HEAD.size, []
    for _ in range(count):
        if at + _PLACE.size > len(data):
            raise LocalProtocolError(f"WORKERS ends inside a place: {len(data)} bytes")
        port, name_bytes = _PLACE.unpack_from(data, at)
        at += _PLACE.size
        places.append(Place(port=port, name=_name(data[at : at + name_bytes], name_bytes)))
        at += name_bytes
    if at != len(data):
        raise LocalProtocolError(f"{len(data) - at} bytes too many in WORKERS")
    if any((place.port == 0) == (place.name == "") for place in places):
        raise LocalProtocolError("a worker's place is a port or a name")
    if len(set(places)) != count:
        raise LocalProtocolError("two workers have one place")
    assert len(gateway_id) == GATEWAY_ID_BYTES
    return WorkerMap(gateway_id=gateway_id, places=tuple(places), worker=worker)


def _name(raw: bytes, name_bytes: int) -> str:
    """A file name, which leads nowhere else than into its directory."""
    if len(raw) != name_bytes or len(raw) > MAX_PLACE_NAME_BYTES:
        raise LocalProtocolError(f"a name of {name_bytes} bytes in WORKERS")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise LocalProtocolError("a worker's name is not UTF-8") from None
    if "/" in name or "\0" in name or name in (".", ".."):
        raise LocalProtocolError(f"{name!r} is not a file name")
    return name
