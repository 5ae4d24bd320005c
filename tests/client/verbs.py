"""Every verb as a value: what to call, the memory it is given, and whether its result is right."""

from collections.abc import Awaitable, Callable
from typing import Any

import attrs

from adp_client import Client
from adp_client.testing import MemoryGateway
from client.support import NAMESPACE, pattern

COUNT, SIZE = 6, 3000
KEYS = [b"key-%d" % at for at in range(COUNT)]
ABSENT = [b"no-%02d" % at for at in range(COUNT)]
MARK = 0xA5


@attrs.define
class Call:
    """One verb, the memory it was given, and how to tell whether its result is right."""

    run: Callable[[Client], Awaitable[Any]]
    is_right: Callable[[Any], bool]
    memory: list[bytearray]


def exist() -> Call:
    return Call(
        lambda c: c.exist(NAMESPACE, [*KEYS, *ABSENT]),
        lambda r: r.statuses == bytes(COUNT) + b"\1" * COUNT,
        [],
    )


def read() -> Call:
    memory = [bytearray(SIZE) for _ in KEYS]
    return Call(
        lambda c: c.read(NAMESPACE, KEYS, memory),
        lambda r: r.is_all_ok and all(bytes(m) == pattern(at, SIZE) for at, m in enumerate(memory)),
        memory,
    )


def write() -> Call:
    memory = [bytearray(pattern(at, SIZE)) for at in range(COUNT)]
    return Call(lambda c: c.write(NAMESPACE, KEYS, memory), lambda r: r.is_all_ok, memory)


def write_spanning_frames() -> Call:
    memory = [bytearray(pattern(9, 20_000))]
    return Call(lambda c: c.write(NAMESPACE, [b"large"], [[memory[0]]]), lambda r: r.is_all_ok, memory)


def delete() -> Call:
    return Call(lambda c: c.delete(NAMESPACE, ABSENT), lambda r: r.statuses == b"\1" * COUNT, [])


def check() -> Call:
    return Call(lambda c: c.check(NAMESPACE, KEYS), lambda r: r.is_all_ok, [])


def fence() -> Call:
    return Call(lambda c: c.fence(), lambda r: r is None, [])


def ping() -> Call:
    return Call(lambda c: c.ping(), lambda r: r >= 0, [])


VERBS = [exist, read, write, write_spanning_frames, delete, check, fence, ping]


def stored(**settings: Any) -> MemoryGateway:
    gateway = MemoryGateway(**settings)
    for at, key in enumerate(KEYS):
        gateway.put(NAMESPACE, key, pattern(at, SIZE))
    return gateway
