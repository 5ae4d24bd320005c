"""Payload on its way into the caller's memory: how far it is, and whether it is what its writer wrote."""

from collections.abc import Sequence

import xxhash

from .protocol.messages import ReadItems


class Landing:
    """Follows the payload of one READ reply. `progress` runs in the thread that received the bytes, while
    they are still in that core's cache: the place to make a checksum.

    `views` is the memory of the items that have bytes in this frame. `hashers` outlives the frame: in it wait
    the digests of objects that go on in the next one, by item of the call. `damaged` are the positions in
    `rows` whose object is complete and has another checksum than its writer said.
    """

    def __init__(
        self,
        rows: ReadItems,
        items: Sequence[int],
        views: Sequence[memoryview],
        hashers: dict[int, xxhash.xxh3_64],
        *,
        is_verified: bool,
    ) -> None:
        self.rows = rows
        self.positions: Sequence[int] = range(len(rows))  # of the items that have bytes
        if not all(rows.lengths):
            self.positions = [at for at, length in enumerate(rows.lengths) if length]
        self.total_bytes = sum(rows.lengths)
        self.count = 0  # how many of them are complete
        self.damaged: list[int] = []
        self._items = items
        self._views = views
        self._hashers = hashers
        self._is_verified = is_verified
        self._offset = 0  # in the view that is being filled

    def progress(self, count: int) -> None:
        """`count` more bytes are in."""
        while count:
            view = self._views[self.count]
            end = self._offset + count
            if end < len(view):
                if self._is_verified:
                    self._hasher().update(view[self._offset : end])
                self._offset = end
                return
            count = end - len(view)
            if self._is_verified:
                self._finish(view)
            self.count += 1
            self._offset = 0

    def let_go(self) -> None:
        """Keep no view of the memory: a traceback, or an idle worker thread, may keep this object."""
        self._views = ()

    def _hasher(self) -> xxhash.xxh3_64:
        """The digest of the object that is being filled, as far as it is."""
        row = self.positions[self.count]
        item = self._items[self.rows.indices[row]]
        if not self._offset and not self.rows.offsets[row]:
            self._hashers[item] = xxhash.xxh3_64()
        return self._hashers[item]

    def _finish(self, view: memoryview) -> None:
        """All bytes of one item are in."""
        rows, row = self.rows, self.positions[self.count]
        if not self._offset and rows.lengths[row] == rows.object_bytes[row]:
            digest = xxhash.xxh3_64_intdigest(view)
        else:
            hasher = self._hasher()
            hasher.update(view[self._offset :])
            if rows.offsets[row] + rows.lengths[row] < rows.object_bytes[row]:
                return
            digest = hasher.intdigest()
            del self._hashers[self._items[rows.indices[row]]]
        if digest != rows.checksums[row]:
            self.damaged.append(row)
