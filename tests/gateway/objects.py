"""Objects for the store tests, and the short ways to put and get them."""

import os
import random
from collections.abc import Mapping

import xxhash

from adp_gateway.config import StoreConfig
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import ObjectStore, PutItem, Status

KIB = 1 << 10
MIB = 1 << 20
NAMESPACE = bytes(range(32))
OTHER_NAMESPACE = bytes(32)


def key(n: int) -> bytes:
    return b"key-%06d" % n + bytes(30)


def payload(seed: object, length: int) -> bytes:
    """Bytes that no other seed has."""
    return random.Random(repr(seed)).randbytes(length)


def item(name: bytes, data: bytes) -> PutItem:
    return PutItem(key=name, checksum=xxhash.xxh3_64_intdigest(data), data=memoryview(data))


async def put(store: ObjectStore, name: bytes, data: bytes, namespace: bytes = NAMESPACE) -> Status:
    (status,) = await store.put_many(namespace, [item(name, data)])
    return Status(status)


async def put_all(store: ObjectStore, objects: Mapping[bytes, bytes]) -> None:
    assert not any(await store.put_many(NAMESPACE, [item(name, data) for name, data in objects.items()]))


def lease_bytes(lease) -> bytes:
    """What a sendfile of the lease would send."""
    return b"".join(os.pread(extent.fd, extent.length, extent.offset) for extent in lease.extents)


async def get(store: ObjectStore, name: bytes, namespace: bytes = NAMESPACE) -> bytes | Status:
    """The object's bytes as a session would send them, or why there are none."""
    (lease,) = store.open_read(namespace, [name])
    if lease is None:
        return Status.NOT_FOUND
    try:
        (status,) = await store.verify([lease])
        return lease_bytes(lease) if status == Status.OK else Status(status)
    finally:
        lease.release()


def config(directory, **changes) -> StoreConfig:
    """A store of 16 small segments, each of which takes objects up to 248 KiB."""
    settings = {
        "directory": directory,
        "capacity_bytes": 4 * MIB,
        "segment_bytes": 256 * KIB,
        "max_command_bytes": 16 * KIB,
        "io_threads": 2,
    }
    return StoreConfig(**(settings | changes))


def disk_bytes(directory) -> int:
    """What the files of a directory take: their lengths or their blocks, whichever is more."""
    total = 0
    for path in directory.iterdir():
        status = path.stat()
        total += max(status.st_size, status.st_blocks * 512)
    return total


def after_kill(device: MemoryDevice) -> MemoryDevice:
    """The device as the next process finds it when this one is killed now: every command that returned."""
    return device.after_power_cut(len(device.commands), lambda command: command.length or 1)


def change(device: MemoryDevice, name: str, position: int, mask: int) -> None:
    """Flip these bits of one byte behind the store's back."""
    file = device.open(name)
    view = memoryview(bytearray(1))
    file.read_into(view, position)
    file.write(memoryview(bytes([view[0] ^ mask])), position)
    file.close()
