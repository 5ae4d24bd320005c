"""How payload is followed into memory: any pieces, any cut into frames, with and without checksums."""

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from adp_client.landing import Landing
from adp_client.protocol.messages import ReadItem, read_items
from client.support import pattern


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    frame_bytes=st.integers(1, 120),
    piece_bytes=st.integers(1, 60),
    damaged=st.sets(st.integers(0, 7)),
    is_verified=st.booleans(),
)
def test_whatever_the_pieces(
    sizes: list[int], frame_bytes: int, piece_bytes: int, damaged: set[int], is_verified: bool
) -> None:
    objects = [pattern(at, size) for at, size in enumerate(sizes)]
    checksums = [xxhash.xxh3_64_intdigest(data) ^ (at in damaged) for at, data in enumerate(objects)]
    rows: list[ReadItem] = []
    frames: list[list[ReadItem]] = [rows]
    room = frame_bytes
    for at, data in enumerate(objects):
        offset = 0
        while offset < len(data):
            if not room:
                rows, room = [], frame_bytes
                frames.append(rows)
            length = min(room, len(data) - offset)
            rows.append(
                ReadItem(
                    index=at, object_bytes=len(data), offset=offset, length=length, checksum=checksums[at]
                )
            )
            offset, room = offset + length, room - length
    hashers: dict[int, xxhash.xxh3_64] = {}
    found: list[int] = []
    for items in map(read_items, frames):
        views = [memoryview(objects[row.index])[row.offset : row.offset + row.length] for row in items]
        landing = Landing(items, range(100, 100 + len(sizes)), views, hashers, is_verified=is_verified)
        left = landing.total_bytes
        while left:
            assert landing.count < len(items)
            count = min(piece_bytes, left)
            landing.progress(count)
            left -= count
        assert landing.count == len(items)
        found += [items[row].index for row in landing.damaged]
    assert found == [at for at in range(len(sizes)) if is_verified and at in damaged]
    assert hashers == {}


def test_rows_without_bytes_are_passed_over() -> None:
    rows = read_items([ReadItem(index=0), ReadItem(index=1, object_bytes=3, length=3), ReadItem(index=2)])
    landing = Landing(rows, range(3), [memoryview(b"abc")], {}, is_verified=True)
    landing.progress(3)
    assert (landing.positions, landing.count, landing.damaged) == ([1], 1, [1])
