"""Replies cut to what the client receives in one frame. Pure: protocol values in, protocol values out."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from adp_client.protocol.messages import ReadItem, StatusReply

from .store.base import Extent

REPLY_HEAD_BYTES = 16
EXIST_HEAD_BYTES = 32
READ_ITEM_BYTES = 32
#: A client that receives less than this in one frame cannot be answered at all.
MIN_BODY_BYTES = 64
#: Nor one that wants objects in crumbs: each frame has its price. A client may take no payload at all.
MIN_PAYLOAD_BYTES = 1024


#: How much is prepared, and so at the earliest sent, in one go: less at first, so that sending starts soon.
FIRST_PORTION_BYTES = 2 << 20
PORTION_BYTES = 8 << 20  # of what is verified first
PORTION_ITEMS = 512


@attrs.frozen
class Found:
    """An object that is to be sent as item `index`."""

    index: int
    object_bytes: int
    checksum: int


def read_frames(
    failed: Sequence[ReadItem], found: Iterable[Found], *, max_payload_bytes: int, max_body_bytes: int
) -> Iterator[list[ReadItem]]:
    """The items of each frame, in order: first those that are not OK, then the objects.

    An object that fits a frame is not cut; a larger one fills frame after frame.
    """
    max_items = max(1, (max_body_bytes - REPLY_HEAD_BYTES) // READ_ITEM_BYTES)
    frame: list[ReadItem] = []
    room_bytes = max_payload_bytes
    for item in failed:
        if len(frame) == max_items:
            yield frame
            frame = []
        frame.append(item)
    for obj in found:
        offset = 0
        while True:
            length = obj.object_bytes - offset
            is_cut = length > room_bytes
            if len(frame) == max_items or (is_cut and (length <= max_payload_bytes or not room_bytes)):
                yield frame
                frame, room_bytes = [], max_payload_bytes
                is_cut = length > room_bytes
            if is_cut:
                length = room_bytes
            frame.append(
                ReadItem(
                    index=obj.index,
                    object_bytes=obj.object_bytes,
                    offset=offset,
                    length=length,
                    checksum=obj.checksum,
                )
            )
            offset += length
            room_bytes -= length
            if offset == obj.object_bytes:
                break
    if frame:
        yield frame


def status_replies(statuses: bytes, *, max_body_bytes: int) -> list[StatusReply]:
    """All statuses, in as many frames as the client's body limit asks for; at least one."""
    step = max(1, max_body_bytes - REPLY_HEAD_BYTES)
    return [
        StatusReply(first=first, statuses=statuses[first : first + step])
        for first in range(0, max(1, len(statuses)), step)
    ]


def portions(lengths: Mapping[int, int], portion_bytes: int) -> Iterator[list[int]]:
    """The items whose `lengths` are given, in order, cut into what is prepared together."""
    portion: list[int] = []
    room_bytes = FIRST_PORTION_BYTES
    for index, length in lengths.items():
        if portion and (length > room_bytes or len(portion) == PORTION_ITEMS):
            yield portion
            portion, room_bytes = [], portion_bytes
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
