"""Replies cut to what the client receives in one frame. Pure: protocol values in, protocol values out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from adp_client.protocol.messages import ReadItem, ReadItems, StatusReply, read_items

from .store.base import Extent

REPLY_HEAD_BYTES = 16
EXIST_HEAD_BYTES = 32
READ_ITEM_BYTES = 32
#: A client that receives less than this in one frame cannot be answered at all.
MIN_BODY_BYTES = 64
#: Nor one that wants objects in crumbs: each frame has its price. A client may take no payload at all.
MIN_PAYLOAD_BYTES = 1024


#: How much is verified, and so at the earliest sent, in one go: less at first, so that sending starts soon.
FIRST_PORTION_BYTES = 2 << 20
PORTION_BYTES = 8 << 20
PORTION_ITEMS = 512


class Found(NamedTuple):
    """Objects that are to be sent, by column: object n as item `indices[n]`."""

    indices: tuple[int, ...] = ()
    object_bytes: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()

    def frame(self, start: int, end: int) -> ReadItems:
        """The objects from `start` to `end`, whole."""
        lengths = self.object_bytes[start:end]
        return ReadItems(
            indices=self.indices[start:end],
            statuses=bytes(end - start),
            object_bytes=lengths,
            offsets=(0,) * (end - start),
            lengths=lengths,
            checksums=self.checksums[start:end],
        )


def read_frames(
    failed: Sequence[ReadItem], found: Found, *, max_payload_bytes: int, max_body_bytes: int
) -> Iterator[ReadItems]:
    """The items of each frame, in order: first those that are not OK, then the objects.

    An object that fits a frame is not cut; a larger one fills frame after frame.
    """
    max_items = max(1, (max_body_bytes - REPLY_HEAD_BYTES) // READ_ITEM_BYTES)
    if failed or max(found.object_bytes, default=0) > max_payload_bytes:
        yield from map(read_items, _cut_frames(failed, found, max_payload_bytes, max_items))
        return
    start, room_bytes = 0, max_payload_bytes
    for at, length in enumerate(found.object_bytes):
        if length > room_bytes or at - start == max_items:
            yield found.frame(start, at)
            start, room_bytes = at, max_payload_bytes
        room_bytes -= length
    if found.indices:
        yield found.frame(start, len(found.indices))


def _cut_frames(
    failed: Sequence[ReadItem], found: Found, max_payload_bytes: int, max_items: int
) -> Iterator[list[ReadItem]]:
    """Any items, at least one, each by itself."""
    frame: list[ReadItem] = []
    room_bytes = max_payload_bytes
    for item in failed:
        if len(frame) == max_items:
            yield frame
            frame = []
        frame.append(item)
    for index, object_bytes, checksum in zip(*found, strict=True):
        offset = 0
        while True:
            length = object_bytes - offset
            is_cut = length > room_bytes
            if len(frame) == max_items or (is_cut and (length <= max_payload_bytes or not room_bytes)):
                yield frame
                frame, room_bytes = [], max_payload_bytes
                is_cut = length > room_bytes
            if is_cut:
                length = room_bytes
            frame.append(
                ReadItem(
                    index=index,
                    object_bytes=object_bytes,
                    offset=offset,
                    length=length,
                    checksum=checksum,
                )
            )
            offset += length
            room_bytes -= length
            if offset == object_bytes:
                break
    yield frame


def status_replies(statuses: bytes, *, max_body_bytes: int) -> list[StatusReply]:
    """All statuses, in as many frames as the client's body limit asks for; at least one."""
    step = max(1, max_body_bytes - REPLY_HEAD_BYTES)
    return [
        StatusReply(first=first, statuses=statuses[first : first + step])
        for first in range(0, max(1, len(statuses)), step)
    ]


def portions(lengths: Mapping[int, int]) -> Iterator[list[int]]:
    """The items whose `lengths` are given, in order, cut into what is verified together."""
    portion: list[int] = []
    room_bytes = FIRST_PORTION_BYTES
    for index, length in lengths.items():
        if portion and (length > room_bytes or len(portion) == PORTION_ITEMS):
            yield portion
            portion, room_bytes = [], PORTION_BYTES
        portion.append(index)
        room_bytes -= length
    if portion:
        yield portion


def cut_extents(extents: Sequence[Extent], offset: int, length: int) -> list[Extent]:
    """The part `[offset, offset + length)` of the bytes that `extents` hold one after the other."""
    parts: list[Extent] = []
    for extent in extents:
        if not length:
            break
        if offset >= extent.length:
            offset -= extent.length
            continue
        count = min(length, extent.length - offset)
        parts.append(Extent(extent.fd, extent.offset + offset, count))
        offset = 0
        length -= count
    return parts


def joined(extents: Sequence[Extent]) -> list[Extent]:
    """The same bytes in as few extents as they lie in: what was written together lies side by side."""
    found: list[Extent] = []
    fd = begin = end = -1
    for extent in extents:
        if extent.offset == end and extent.fd == fd:
            end += extent.length
            continue
        if fd >= 0:
            found.append(Extent(fd, begin, end - begin))
        fd, begin, end = extent.fd, extent.offset, extent.offset + extent.length
    if fd >= 0:
        found.append(Extent(fd, begin, end - begin))
    return found
