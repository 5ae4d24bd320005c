"""Target `store_image`: a store that was whole once, and what time and bad luck have made of it."""

import functools
import os
from collections.abc import Callable, Iterator

import anyio
import attrs
import xxhash

from adp_gateway.config import StoreConfig
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.errors import StorageError
from adp_gateway.store.base import PutItem, Status
from adp_gateway.store.catalog import Catalog
from adp_gateway.store.files import append_kills
from adp_gateway.store.format import (
    SUPERBLOCK_NAME,
    Header,
    Kind,
    Record,
    data_name,
    encode_header,
    encode_records,
    journal_name,
    parse_name,
)
from adp_gateway.store.index import Entry
from adp_gateway.store.recovery import recover, resume
from adp_gateway.store.segments import SegmentStore
from adp_gateway.store.transfer import Source, Target, Transfers

SEGMENT_BYTES = 64 << 10
CAPACITY_BYTES = 16 * SEGMENT_BYTES
COMMAND_BYTES = 4096
NAMESPACES = (bytes(range(32)), bytes(32))
#: No mutation makes a file longer than this, so nothing here may need more memory than some of it.
MAX_FILE_BYTES = 192 << 10
ADDED = b"written after the recovery"
Subject = tuple[bytes, bytes]
Image = dict[str, bytearray]


@attrs.frozen
class Base:
    """A valid image, and every version of every object that was ever written to it."""

    files: dict[str, bytes]
    written: dict[Subject, tuple[bytes, ...]]


def _settings() -> StoreConfig:
    return StoreConfig(
        directory="unused",
        capacity_bytes=CAPACITY_BYTES,
        segment_bytes=SEGMENT_BYTES,
        max_command_bytes=COMMAND_BYTES,
        io_threads=1,
    )


def _content(seed: int, length: int) -> bytes:
    stem = b"".join((seed * 1_000_003 + at).to_bytes(8, "little") for at in range(length // 8 + 1))
    return stem[:length]


@functools.cache
def base() -> Base:
    """A few segments: objects of many sizes, some written again, some deleted. Made by the store itself."""
    written: dict[Subject, list[bytes]] = {}

    async def fill(device: MemoryDevice) -> None:
        async with SegmentStore.open(_settings(), device=device) as store:
            for number in range(24):
                namespace = NAMESPACES[number % 2]
                key = b"key-%d" % (number % 17) + bytes(number % 5)
                data = _content(number, (0, 1, 100, 4096, 4097, 9000, 17000)[number % 7])
                item = PutItem(key=key, checksum=xxhash.xxh3_64_intdigest(data), data=memoryview(data))
                assert not any(await store.put_many(namespace, [item]))
                written.setdefault((namespace, key), []).append(data)
                if number % 6 == 5:
                    await store.delete_many(namespace, [key])
            assert store.stats().segments >= 3

    with MemoryDevice(max_command_bytes=COMMAND_BYTES) as device:
        anyio.run(fill, device)
        files = {name: _contents(device, name) for name in device.names()}
    return Base(files, {subject: tuple(versions) for subject, versions in written.items()})


def _contents(device: MemoryDevice, name: str) -> bytes:
    file = device.open(name)
    try:
        return os.pread(file.fileno(), file.size(), 0)
    finally:
        file.close()


class _Reader:
    """Numbers out of the input; zeros when it is used up."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def number(self, size: int = 1) -> int:
        return int.from_bytes(self.some(size), "little")

    def some(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken.ljust(size, b"\0")

    def run(self) -> bytes:
        """A length of one byte, and as many bytes as there are of it."""
        length = self.number()
        taken = self._data[self._at : self._at + length]
        self._at += length
        return taken


def _place(reader: _Reader, contents: bytearray) -> int:
    return reader.number(3) % (len(contents) + 1)


def _overwrite(image: Image, name: str, reader: _Reader) -> None:
    at, run = _place(reader, image[name]), reader.run()
    image[name][at : at + len(run)] = run


def _insert(image: Image, name: str, reader: _Reader) -> None:
    at = _place(reader, image[name])
    image[name][at:at] = reader.run()


def _cut(image: Image, name: str, reader: _Reader) -> None:
    del image[name][_place(reader, image[name]) :]


def _extend(image: Image, name: str, reader: _Reader) -> None:
    image[name].extend(bytes(reader.number(2)))


def _swap(image: Image, name: str, reader: _Reader) -> None:
    other = _name(image, reader)
    image[name], image[other] = image[other], image[name]


def _copy(image: Image, name: str, reader: _Reader) -> None:
    """A whole record, or a piece like one, from elsewhere: a misdirected write."""
    contents = image[_name(image, reader)]
    source = reader.number(2) * 192 % (len(contents) + 1)
    at = reader.number(2) * 192 % (len(image[name]) + 1)
    piece = contents[source : source + 192]
    image[name][at : at + len(piece)] = piece


def _replace(image: Image, name: str, reader: _Reader) -> None:
    image[name] = bytearray(reader.run())


def _remove(image: Image, name: str, reader: _Reader) -> None:
    image.pop(name)


def _rename(image: Image, name: str, reader: _Reader) -> None:
    """Another number for a file, or for both files of a segment: somebody has moved things by hand."""
    number = reader.number(reader.number() % 6)
    parsed = parse_name(name)
    if parsed is not None and reader.number() & 1:
        for name_of in (data_name, journal_name):
            if name_of(parsed[0]) in image:
                image[name_of(number)] = image.pop(name_of(parsed[0]))
    else:
        image[(data_name, journal_name)[reader.number() & 1](number)] = image.pop(name)


def _forge(image: Image, name: str, reader: _Reader) -> None:
    """A journal with records whose checksums are right, so that a mutation reaches what replays them."""
    segment_id = reader.number() % 8
    raw = bytearray(encode_header(Header(segment_id, reader.number(3))))
    for slot in range(1, reader.number() % 16 + 1):
        record = Record(
            kind=Kind(reader.number() % 2 + 1),
            namespace=reader.run().ljust(32, b"\0")[:32],
            key=reader.run()[:128] or b"k",
            offset=reader.number(2) * 4096,
            length=reader.number(4),
            checksum=reader.number(8),
            sequence=reader.number(7),  # a store never comes as far as the eighth byte
        )
        raw += encode_records([record], segment_id=segment_id, slot=slot)
    image[journal_name(segment_id)] = raw
    image.setdefault(data_name(segment_id), bytearray())


MUTATIONS: tuple[Callable[[Image, str, _Reader], None], ...] = (
    _overwrite,
    _insert,
    _cut,
    _extend,
    _swap,
    _copy,
    _replace,
    _remove,
    _rename,
    _forge,
)


def _name(image: Image, reader: _Reader) -> str:
    names = sorted(image)
    return names[reader.number() % len(names)]


def mutated(data: bytes) -> Image:
    """The valid image after the mutations that `data` spells. The first byte: from the image, or raw.

    Raw: the rest is a journal, or a superblock, as it is.
    """
    image = {name: bytearray(contents) for name, contents in base().files.items()}
    if not data:
        return image
    reader = _Reader(data[1:])
    if data[0] == 1:
        image[journal_name(2)] = bytearray(data[1:])
    elif data[0] == 2:
        image[SUPERBLOCK_NAME] = bytearray(data[1:])
    else:
        while reader and image:
            mutate = MUTATIONS[reader.number() % len(MUTATIONS)]
            mutate(image, _name(image, reader), reader)
            for contents in image.values():
                del contents[MAX_FILE_BYTES:]
    return image


def _device(image: Image) -> MemoryDevice:
    device = MemoryDevice(max_command_bytes=COMMAND_BYTES)
    for name, contents in image.items():
        file = device.create(name)
        os.pwrite(file.fileno(), contents, 0)
        file.close()
    device.commands.clear()
    return device


def _offered(catalog: Catalog, subjects: set[Subject]) -> Iterator[tuple[Subject, Entry]]:
    for namespace, key in subjects:
        entry = catalog.index.get(namespace, key)
        if entry is not None:
            yield (namespace, key), entry


def _close(catalog: Catalog) -> None:
    for segment in catalog.segments.values():
        segment.data.close()
        segment.journal.close()


def store_image(data: bytes) -> None:
    """Whatever stands on the device: recovery comes to an end, and offers nothing but what was written.

    StorageError is the one thing it may raise. What it offers verifies, or is found damaged; what verifies
    are bytes that once were written under that name. A recovery of what a recovery has left finds the same,
    with nothing to cut; and what is written after one is there after the next.
    """
    device = _device(mutated(data))
    with device:
        try:
            catalog, report = recover(device)
            resume(catalog, segment_bytes=SEGMENT_BYTES)
        except StorageError:
            return
        try:
            assert report.objects == len(catalog.index)
            found = _checked(catalog)
            added = _add(catalog)
            kills = [(catalog.segments[number], kills) for number, kills in catalog.unkilled.items()]
            assert not any(append_kills(kills, False))
        finally:
            _close(catalog)
        again, second = recover(device)
        try:
            assert second.cut_bytes == 0, "a torn tail was left for the next recovery"
            assert not second.is_superblock_new
            expected = len(catalog.index)
            assert len(again.index) == expected, f"{len(again.index)} objects instead of {expected}"
            found_again = _checked(again)
            if added is not None:
                assert found_again[added] == ADDED, "what was written after the recovery is gone"
                found[added] = ADDED
            assert found_again == found
        finally:
            _close(again)
        assert device.used_bytes() <= len(device.names()) * (MAX_FILE_BYTES + SEGMENT_BYTES)


def _subjects(catalog: Catalog) -> set[Subject]:
    """Every name that the catalog can answer for."""
    return {
        (group.namespace, key)
        for segment_id in catalog.segments
        for group in catalog.index.segment(segment_id)
        for key in group.keys
    }


def _checked(catalog: Catalog) -> dict[Subject, bytes]:
    """What the catalog offers and what verifies of it."""
    transfers = Transfers(COMMAND_BYTES)
    found: dict[Subject, bytes] = {}
    for subject, entry in _offered(catalog, _subjects(catalog)):
        file = catalog.segments[entry.segment_id].data
        (status,) = transfers.verify([Source(file, *entry[1:4])])
        assert status in (Status.OK, Status.CORRUPT), f"a check that answers {status}"
        if status == Status.OK:
            raw = os.pread(file.fileno(), entry.length, entry.offset)
            assert len(raw) == entry.length
            assert xxhash.xxh3_64_intdigest(raw) == entry.checksum, "wrong bytes"
            versions = base().written.get(subject)
            assert versions is None or raw in versions, "another object's bytes"
            found[subject] = raw
    return found


def _add(catalog: Catalog) -> Subject | None:
    """Write one object as the store would, if there is a segment to go on in."""
    segment = catalog.active
    if segment is None or not segment.has_room(len(ADDED)):
        return None
    record = Record(
        kind=Kind.COMMIT,
        namespace=NAMESPACES[0],
        key=b"new",
        offset=segment.allocate(len(ADDED)),
        length=len(ADDED),
        checksum=xxhash.xxh3_64_intdigest(ADDED),
        sequence=catalog.take_sequence(),
    )
    target = Target(segment.data, segment.journal, False)
    written = Transfers(COMMAND_BYTES).write(target, [memoryview(ADDED)], [record])
    assert written.statuses == bytes([Status.OK])
    entry = Entry(segment.segment_id, *record[3:7])
    catalog.commit(record.namespace, record.key, entry)
    return record.namespace, record.key
