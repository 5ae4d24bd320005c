"""Target `session`: the gateway's own session over a transport in memory, on a clock that does not wait."""

import contextlib
import logging

import anyio
import anyio.lowlevel
import trio
import trio.testing

from adp_client.protocol import Connection, Feature, Opcode, Role
from adp_client.protocol.codec import decode_body
from adp_client.protocol.constants import HEADER_BYTES, Flag
from adp_client.protocol.frames import check_body, decode_header
from adp_client.protocol.messages import ErrorMessage, Hello, Limits, payload_lengths
from adp_client.transport import Transport
from adp_client.transport.memory import memory_pair
from adp_gateway.admission import Admission
from adp_gateway.buffers import Arena
from adp_gateway.credits import Credits
from adp_gateway.session import Session
from adp_gateway.shared import Shared
from adp_gateway.store.memory import MemoryStore

from .sealing import split

LIMITS = Limits(
    max_body_bytes=4096,
    max_payload_bytes=8192,
    max_items=64,
    max_object_bytes=4096,
    max_requests=8,
    max_inflight_bytes=32768,
)
HELLO = Hello(features=~Feature.NONE, max_body_bytes=4096, max_payload_bytes=8192)
ARENA_BYTES = 16384  # less than the window: some must wait, and some in vain
STORE_BYTES = 32768
REQUEST_BYTES = 8192
NOTICES = (Opcode.ERROR, Opcode.GOODBYE, Opcode.CREDIT)
MAX_SILENCE_SECONDS = 40.0  # beyond every patience that a session has with a peer in the middle of something
MAX_LIFE_SECONDS = 600.0  # of the virtual clock; a session that is older hangs


def session(data: bytes) -> None:
    """Any bytes after the handshake: answers that are whole frames, at most one ERROR and last, then the end.

    No exception leaves the session; it holds no more memory than it was given; and when it is over, every
    lease, block and place that its requests had has been given back. The first bit of the second byte says
    whether the client hangs up when it has said everything, or falls silent.
    """
    chunk, raw = split(data[:1] + data[2:])
    is_silent = bool(data[1:2]) and bool(data[1] & 1)
    logging.disable(logging.CRITICAL)
    try:
        trio.run(_serve, raw, chunk, is_silent, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        logging.disable(logging.NOTSET)


async def _serve(raw: bytes, chunk: int, is_silent: bool) -> None:
    store = MemoryStore(capacity_bytes=STORE_BYTES, max_object_bytes=LIMITS.max_object_bytes)
    shared = Shared(
        store=store,
        arena=Arena(ARENA_BYTES),
        admission=Admission(REQUEST_BYTES),
        credits=Credits(
            inflight_bytes=LIMITS.max_inflight_bytes, requests=LIMITS.max_requests, limits=LIMITS
        ),
        limits=LIMITS,
        boot_id=b"boot" * 4,
        agent="fuzz",
        max_queued_bytes=4096,
    )
    ours, theirs = memory_pair(capacity_bytes=16384, chunk_bytes=chunk)
    heard = bytearray()
    with anyio.fail_after(MAX_LIFE_SECONDS):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Session(theirs, shared, peer="fuzz").run)
            tasks.start_soon(_listen, ours, heard)
            with contextlib.suppress(OSError):  # it may hang up before the end
                await ours.send([Connection(Role.CLIENT).hello(HELLO), raw])
            await anyio.sleep(MAX_SILENCE_SECONDS if is_silent else 0.001)
            assert shared.arena.used_bytes <= ARENA_BYTES
            assert store.stats().object_bytes <= STORE_BYTES
            await ours.aclose()
    _check_answers(bytes(heard))
    assert store.stats().leases == 0, "a lease is out"
    assert shared.arena.used_bytes == shared.arena.waiting == 0, "memory is out"
    assert shared.admission.used_bytes == 0, "a place is taken"
    assert shared.counters.sessions == shared.credits.connections == 0
    assert shared.counters.faults == 0, "a request failed for the gateway's own reasons"


async def _listen(transport: Transport, heard: bytearray) -> None:
    buffer = memoryview(bytearray(4096))
    try:
        while count := await transport.receive_some([buffer]):
            heard += buffer[:count]
    except OSError:
        pass  # our own end was closed under us


def _check_answers(heard: bytes) -> None:
    """Whole frames that decode; one ERROR at most, and nothing behind it. The last may be cut by our end."""
    at = 0
    while len(heard) - at >= HEADER_BYTES:
        header = decode_header(memoryview(heard)[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        if len(heard) - at < header.body_bytes:
            return
        body = memoryview(heard)[at : at + header.body_bytes]
        check_body(header, body)
        message = decode_body(header.opcode, Flag.REPLY in header.flags, body)
        assert Flag.REPLY in header.flags or header.opcode in NOTICES
        assert sum(payload_lengths(message)) == header.payload_bytes
        at += header.body_bytes + header.payload_bytes
        if isinstance(message, ErrorMessage):
            assert at == len(heard), "it speaks on after ERROR"
