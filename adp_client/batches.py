"""Cutting a call's items into requests that the gateway takes (spec sections 4.3 and 7.4). Pure arithmetic.

Items are cut by four limits: keys of one width, `max_items`, the body, and the bytes in flight. Requests are
kept well below the window, so that several are under way and none waits for all the others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from .protocol.constants import MAX_KEY_BYTES
from .protocol.errors import LocalProtocolError
from .protocol.keys import ObjectKey
from .protocol.messages import Limits

MAX_BATCH_BYTES = 64 << 20  # payload of one request, if it has more than one item
VECTOR_HEAD_BYTES = 48


def check_keys(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """`keys` as they go on the wire. Raises LocalProtocolError for one that no gateway takes."""
    if isinstance(keys, (str, bytes, bytearray, memoryview)) or not isinstance(keys, Iterable):
        raise LocalProtocolError(f"keys are given as a list of bytes, not as {type(keys).__name__}")
    checked = tuple(keys)
    for key in checked:
        if not isinstance(key, bytes):
            if isinstance(key, ObjectKey):
                raise LocalProtocolError("a key is bytes: give the ObjectKey's .to_bytes()")
            raise LocalProtocolError(f"a key is bytes, not {type(key).__name__}: {key!r}")
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise LocalProtocolError(f"a key is 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
    return checked


def group_by_width(keys: Sequence[bytes], items: Sequence[int]) -> list[Sequence[int]]:
    """`items` in groups whose keys have one width; in one group, as it is, if all have the same."""
    widths = set(map(len, keys if len(items) == len(keys) else [keys[item] for item in items]))
    if len(widths) <= 1:
        return [items]
    return [[item for item in items if len(keys[item]) == width] for width in sorted(widths)]


def max_batch_items(limits: Limits, width: int, row_bytes: int) -> int:
    """How many items of a vector fit one body; `row_bytes` is what each has besides its key."""
    return max(1, min(limits.max_items, (limits.max_body_bytes - VECTOR_HEAD_BYTES) // (width + row_bytes)))


def max_batch_bytes(limits: Limits) -> int:
    """Payload of one request, unless a single item is larger."""
    return min(MAX_BATCH_BYTES, max(1, limits.max_inflight_bytes // 4))


def cut(
    items: Sequence[int], size_bytes: Callable[[int], int], *, max_items: int, max_bytes: int
) -> Iterator[Sequence[int]]:
    """Consecutive runs of `items`, none empty, each within both limits or one item long."""
    sizes = list(map(size_bytes, items))
    if 0 < len(sizes) <= max_items and sum(sizes) <= max_bytes:  # as nearly always
        yield items
        return
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and (position - start >= max_items or total + size > max_bytes):
            yield items[start:position]
            start, total = position, 0
        total += size
    if start < len(items):
        yield items[start:]
