"""What is held, by how many, and which deletes wait for it. Pure: no clock, no I/O, no event loop.

A hold is what a lease is to the store: while it stands, its objects are neither evicted nor deleted. It is on
keys, not on bytes: an object that is overwritten is still there, and still held.

Making and releasing a hold costs next to nothing: it is put aside as it came, and its keys are counted only
when a delete or an eviction asks about their namespace, once. While a delete waits for a key, no new hold
gets it; so what the delete waits for only becomes less, and it ends when the holds that it met have ended.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

import attrs

from .base import Status

_IS_OK = bytes([status == Status.OK for status in range(256)])
_NOTHING: Mapping[bytes, int] = {}

#: Receives keys that nothing holds any more, the moment that this is so.
Take = Callable[[Sequence[bytes]], None]


@attrs.define(eq=False)
class KeyHold:
    """A `Hold`: the keys of one vector that were OK."""

    _holds: "Holds"
    _namespace: bytes
    _keys: Sequence[bytes]
    _statuses: bytes
    items: int
    _is_released: bool = False

    @property
    def keys(self) -> Iterable[bytes]:
        """What is held; a key as often as it stood in the vector."""
        return compress(self._keys, self._statuses.translate(_IS_OK))

    def release(self) -> None:
        """End it; idempotent. Deletes that waited for nothing else are taken before this returns."""
        if not self._is_released:
            self._is_released = True
            self._holds._end(self, self._namespace)


@attrs.define(eq=False)
class Wait:
    """A delete. `left`: keys that something holds still; they are taken when nothing does."""

    _holds: "Holds"
    _namespace: bytes
    _take: Take
    left: set[bytes]

    def abandon(self) -> None:
        """Wait no longer: what is left is not taken. Harmless when nothing is."""
        for key in self.left:
            self._holds._forget(self, self._namespace, key)
        self.left.clear()


class Holds:
    """All holds of a store, and the deletes that wait for them."""

    def __init__(self) -> None:
        self._fresh: dict[bytes, dict[KeyHold, None]] = {}  # by namespace: not counted yet
        self._counts: dict[bytes, Counter[bytes]] = {}
        self._waits: dict[bytes, dict[bytes, list[Wait]]] = {}
        self.items = 0  # held now, as often as they are held
        self.ended = 0  # holds; while it stays the same, nothing has become free

    def hold(self, namespace: bytes, keys: Sequence[bytes], statuses: bytes) -> tuple[bytes, KeyHold]:
        """Hold every key whose status is OK. Returns the statuses, NOT_FOUND where a delete waits."""
        waits = self._waits.get(namespace)
        if waits:
            statuses = bytes(
                Status.NOT_FOUND if key in waits else status
                for key, status in zip(keys, statuses, strict=True)
            )
        hold = KeyHold(self, namespace, keys, statuses, statuses.count(Status.OK))
        if hold.items:
            self._fresh.setdefault(namespace, {})[hold] = None
            self.items += hold.items
        return statuses, hold

    def held(self, namespace: bytes) -> Mapping[bytes, int]:
        """Every key of `namespace` that is held, and how often. To be read at once, and not kept."""
        for hold in self._fresh.pop(namespace, ()):
            self._counts.setdefault(namespace, Counter()).update(hold.keys)
        return self._counts.get(namespace, _NOTHING)

    def is_held(self, namespace: bytes, key: bytes) -> bool:
        """Whether anything holds the object."""
        return self.items > 0 and key in self.held(namespace)

    def when_free(self, namespace: bytes, keys: Sequence[bytes], take: Take) -> Wait:
        """Call `take` with the keys that nothing holds, now; with each other one as soon as nothing does."""
        held = self.held(namespace)
        wait = Wait(self, namespace, take, {key for key in keys if key in held} if held else set())
        for key in wait.left:
            self._waits.setdefault(namespace, {}).setdefault(key, []).append(wait)
        take([key for key in keys if key not in wait.left] if wait.left else keys)
        return wait

    def _end(self, hold: KeyHold, namespace: bytes) -> None:
        self.items -= hold.items
        self.ended += 1
        fresh = self._fresh.get(namespace, {})
        if hold in fresh:
            del fresh[hold]
            if not fresh:
                del self._fresh[namespace]
        elif hold.items:
            self._discount(namespace, hold.keys)

    def _discount(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        counts = self._counts[namespace]
        waits = self._waits.get(namespace, {})
        freed: dict[Wait, list[bytes]] = {}
        for key in keys:
            left = counts[key] - 1
            if left:
                counts[key] = left
                continue
            counts.pop(key)  # `del` is slow: a method of Counter's own
            for wait in waits.get(key, ()) if waits else ():
                freed.setdefault(wait, []).append(key)
        if not counts:
            del self._counts[namespace]
        for wait, its_keys in freed.items():
            for key in its_keys:
                self._forget(wait, namespace, key)
            wait.left.difference_update(its_keys)
            wait._take(its_keys)

    def _forget(self, wait: Wait, namespace: bytes, key: bytes) -> None:
        by_key = self._waits[namespace]
        by_key[key].remove(wait)
        if not by_key[key]:
            del by_key[key]
            if not by_key:
                del self._waits[namespace]
