"""Which worker of a gateway keeps an object (spec section 4.5), and vectors cut accordingly. Pure.

Nothing is done for one key at a time that can be done for all of them in one call: this runs for every key
of every vector, in the engine's interpreter.
"""

import operator
from collections.abc import Iterator, Sequence
from itertools import compress, repeat
from typing import TypeVar

import attrs
import xxhash

from .protocol.workers import Place
from .transport.endpoints import Endpoint, UnixEndpoint, parse_endpoint

T = TypeVar("T")


@attrs.frozen
class Part:
    """The items of a vector that one worker keeps, in order."""

    worker: int
    items: Sequence[int]
    keys: tuple[bytes, ...]


def place_endpoint(dialled: Endpoint, place: Place) -> Endpoint:
    """Where a worker is, as one told it who was dialled there. Raises ValueError if it cannot be dialled."""
    if not isinstance(dialled, UnixEndpoint):
        if not place.port:
            raise ValueError(f"a worker at the name {place.name!r}, for a client of {dialled}")
        return attrs.evolve(dialled, port=place.port)
    if place.port:
        raise ValueError(f"a worker at port {place.port}, for a client of {dialled}")
    directory, slash, _ = dialled.path.rpartition("/")
    return parse_endpoint(f"unix://{directory}{slash}{place.name}")


def workers_of(keys: Sequence[bytes], count: int) -> bytes:
    """For each key the worker, of `count` at most 256, that keeps it: XXH3-64 of the key, modulo `count`."""
    return bytes(map(operator.mod, map(xxhash.xxh3_64_intdigest, keys), repeat(count)))


def part_vector(keys: tuple[bytes, ...], count: int) -> Iterator[Part]:
    """The parts of a vector, one for each worker that keeps any of it."""
    places = workers_of(keys, count)
    for worker in sorted(set(places)):
        if places.count(worker) == len(keys):
            yield Part(worker, range(len(keys)), keys)
            return
        chosen = places.translate(bytes(worker) + b"\1" + bytes(255 - worker))
        yield Part(worker, list(compress(range(len(keys)), chosen)), tuple(compress(keys, chosen)))


def pick(values: Sequence[T], items: Sequence[int]) -> Sequence[T]:
    """The values of `items`."""
    if isinstance(items, range) and len(items) == len(values):
        return values
    return [values[item] for item in items]


def merge_statuses(whole: bytearray, items: Sequence[int], statuses: bytes) -> None:
    """Put the statuses of a part where they belong; `whole` is OK everywhere it has not been told of."""
    if isinstance(items, range) and len(items) == len(whole):
        whole[:] = statuses
    elif any(statuses):
        for item, status in zip(items, statuses, strict=True):
            whole[item] = status
