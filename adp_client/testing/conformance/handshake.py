"""Sections 4 and 8: the handshake. Order, versions, limits, features, extensions, the token."""

import struct
from typing import Any

from adp_client.protocol.constants import (
    CRITICAL_EXTENSION,
    HANDSHAKE_BODY_BYTES,
    HEADER_BYTES,
    MAX_KEY_BYTES,
    ErrorCode,
    Feature,
    Opcode,
)
from adp_client.protocol.workers import decode_worker_map

from .clause import Broken, Chapter, Level, expect
from .frames import extension, frame, hello_body, ping_frame, vector
from .trial import EVERYTHING, Trial

HANDSHAKE: Chapter[Trial] = Chapter()

_FEATURES_AT = HEADER_BYTES + 8  # in WELCOME


def _hello(trial: Trial, **fields: Any) -> bytes:
    """A HELLO, right but for `fields`."""
    return frame(Opcode.HELLO, hello_body(token=trial.token or b"", **fields), request_id=0)


async def _welcome_bytes(trial: Trial, features: int) -> bytes:
    """The header and the first 80 bytes of WELCOME as they are, for a HELLO with these feature bits."""
    peer = await trial.dial()
    body = hello_body(features=features, token=trial.token or b"")
    await peer.send(frame(Opcode.HELLO, body, request_id=0))
    raw = bytearray(HEADER_BYTES + 80)
    peer.awaits = "the answer to HELLO"
    try:
        await peer.transport.receive_exactly([memoryview(raw)])
    except (EOFError, ConnectionError):
        raise Broken(f"HELLO with the feature bits {features:#x}: expected WELCOME, got the end") from None
    expect("the opcode of the answer to HELLO", Opcode.HELLO.value, raw[5])
    return bytes(raw)


@HANDSHAKE.clause("4.1-hello-first")
async def hello_first(trial: Trial) -> None:
    """A request before HELLO is an UNEXPECTED_MESSAGE."""
    cases = {"PING instead of HELLO": ping_frame(1)}
    await trial.expect_violations(cases, ErrorCode.UNEXPECTED_MESSAGE, is_greeted=False)


@HANDSHAKE.clause("4.1-hello-twice")
async def hello_twice(trial: Trial) -> None:
    """A second HELLO is an UNEXPECTED_MESSAGE."""
    peer = await trial.connect()
    raw = frame(Opcode.HELLO, hello_body(token=trial.token or b""), request_id=0)
    await trial.expect_violation(peer, raw, ErrorCode.UNEXPECTED_MESSAGE)


@HANDSHAKE.clause("4.1-hello-size")
async def hello_size(trial: Trial) -> None:
    """Until the handshake is done a body above 65,536 bytes, or any payload, is LIMIT_EXCEEDED."""
    body = hello_body(token=trial.token or b"")
    cases = {
        "a body of 65,537 bytes": frame(Opcode.HELLO, request_id=0, body_bytes=HANDSHAKE_BODY_BYTES + 1),
        "a payload of 1 byte": frame(Opcode.HELLO, body, request_id=0, payload_bytes=1) + b"x",
    }
    await trial.expect_violations(cases, ErrorCode.LIMIT_EXCEEDED, is_greeted=False)


@HANDSHAKE.clause("4.1-hello-id")
async def hello_id(trial: Trial) -> None:
    """The handshake has the request id 0."""
    cases = {"HELLO with the id 1": frame(Opcode.HELLO, hello_body(token=trial.token or b""), request_id=1)}
    await trial.expect_violations(cases, ErrorCode.MALFORMED, ErrorCode.UNEXPECTED_MESSAGE, is_greeted=False)


@HANDSHAKE.clause("4.2-no-version")
async def no_version(trial: Trial) -> None:
    """A client that speaks only other versions is refused with UNSUPPORTED_VERSION."""
    cases = {"versions 200 to 300": _hello(trial, versions=(200, 300))}
    await trial.expect_violations(cases, ErrorCode.UNSUPPORTED_VERSION, is_greeted=False)


@HANDSHAKE.clause("4.2-version-in-range")
async def version_in_range(trial: Trial) -> None:
    """A client that also speaks later versions is welcomed in one that it named."""
    peer = await trial.connect(min_version=1, max_version=300)
    assert peer.welcome is not None
    if not 1 <= peer.welcome.version <= 300:
        raise Broken(f"WELCOME: expected a version from 1 to 300, got {peer.welcome.version}")
    await trial.ping(peer)


@HANDSHAKE.clause("4.2-versions-reversed")
async def versions_reversed(trial: Trial) -> None:
    """A HELLO whose lowest version is above its highest is MALFORMED."""
    cases = {"versions 2 to 1": _hello(trial, versions=(2, 1))}
    await trial.expect_violations(cases, ErrorCode.MALFORMED, is_greeted=False)


@HANDSHAKE.clause("4.3-limits")
async def limits(trial: Trial) -> None:
    """The limits in WELCOME let an object of one byte, under the widest key, be written and read."""
    told = trial.limits
    for name in (
        "max_payload_bytes",
        "max_items",
        "max_object_bytes",
        "max_command_bytes",
        "max_requests",
        "max_inflight_bytes",
    ):
        if getattr(told, name) < 1:
            raise Broken(f"{name}: expected at least 1, got {getattr(told, name)}")
    if not 1 <= told.max_key_bytes <= MAX_KEY_BYTES:
        raise Broken(f"max_key_bytes: expected 1 to {MAX_KEY_BYTES}, got {told.max_key_bytes}")
    least = 48 + told.max_key_bytes + 24
    if told.max_body_bytes < least:
        raise Broken(
            f"max_body_bytes: expected room for a WRITE of one item, {least}, got {told.max_body_bytes}"
        )
    if told.max_object_bytes > told.max_inflight_bytes:
        raise Broken(
            f"max_inflight_bytes: expected room for the largest object, {told.max_object_bytes}, "
            f"got {told.max_inflight_bytes}"
        )
    if trial.welcome.features & Feature.LEASES and told.max_lease_ms < 1:
        raise Broken("max_lease_ms: expected at least 1 of a gateway that announces LEASES, got 0")


@HANDSHAKE.clause("4.3-boot-id")
async def boot_id(trial: Trial) -> None:
    """Two connections to a gateway that has not been restarted see one boot id."""
    ids = []
    for _ in range(2):
        peer = await trial.connect()
        assert peer.welcome is not None
        ids.append(peer.welcome.boot_id)
    expect("the boot id on a second connection", ids[0].hex(), ids[1].hex())


@HANDSHAKE.clause("4.3-hello-malformed")
async def hello_malformed(trial: Trial) -> None:
    """A HELLO that is cut short, has bytes too many, or whose agent is no text, is MALFORMED."""
    body = hello_body(token=trial.token or b"")
    cases = {
        "20 bytes of HELLO": frame(Opcode.HELLO, body[:20], request_id=0),
        "HELLO and one byte more": frame(Opcode.HELLO, body + b"x", request_id=0),
        "an agent that is not UTF-8": _hello(trial, agent=b"\xff\xfe"),
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED, is_greeted=False)


@HANDSHAKE.clause("4.4-features")
async def features(trial: Trial) -> None:
    """WELCOME has no feature that HELLO had not, whichever HELLO had."""
    offers = [0, *(feature.value for feature in Feature if feature), EVERYTHING.value]
    for offered in offers:
        raw = await _welcome_bytes(trial, offered)
        (agreed,) = struct.unpack_from("<Q", raw, _FEATURES_AT)
        if agreed & ~offered:
            raise Broken(f"HELLO offers the features {offered:#x}: expected no others, got {agreed:#x}")


@HANDSHAKE.clause("4.4-unknown-features")
async def unknown_features(trial: Trial) -> None:
    """Feature bits that a gateway does not know are ignored."""
    raw = await _welcome_bytes(trial, 0xFFFF_FF00_0000_0000)
    (agreed,) = struct.unpack_from("<Q", raw, _FEATURES_AT)
    expect("features agreed on, of none that are defined", 0, agreed)


@HANDSHAKE.clause("4.4-extension-skipped")
async def extension_skipped(trial: Trial) -> None:
    """An extension that a gateway does not know is skipped."""
    extensions = extension(0x7001, b"of a later time") + extension(0x7002)
    peer = await trial.dial()
    peer.connection.hello(peer.hello)
    await peer.send(_hello(trial, extensions=extensions))
    await peer.welcomed()
    await trial.ping(peer)


@HANDSHAKE.clause("4.4-extension-critical")
async def extension_critical(trial: Trial) -> None:
    """An extension that must not be skipped and is not known refuses the handshake: UNSUPPORTED_VERSION."""
    cases = {"tag 0xf001": _hello(trial, extensions=extension(CRITICAL_EXTENSION | 0x7001, b"must"))}
    await trial.expect_violations(cases, ErrorCode.UNSUPPORTED_VERSION, is_greeted=False)


@HANDSHAKE.clause("4.4-extension-malformed")
async def extension_malformed(trial: Trial) -> None:
    """An extension that is longer than the room for it is MALFORMED."""
    cases = {"500 bytes, of which 5 are there": _hello(trial, extensions=extension(7, b"short", length=500))}
    await trial.expect_violations(cases, ErrorCode.MALFORMED, is_greeted=False)


@HANDSHAKE.clause("4.5-workers")
async def workers(trial: Trial) -> None:
    """A worker of a gateway tells every client the same of itself and of the others."""
    told = decode_worker_map(trial.welcome.extensions)
    trial.need(told is not None, "the gateway is not one of several workers")
    for _ in range(2):
        peer = await trial.connect()
        assert peer.welcome is not None
        again = decode_worker_map(peer.welcome.extensions)
        if again is None:
            raise Broken("WELCOME on another connection: expected the extension WORKERS, got none")
        assert told is not None
        expect("the gateway id on another connection", told.gateway_id.hex(), again.gateway_id.hex())
        expect("the places of workers on another connection", told.places, again.places)
        expect("who answers at the place of a worker", told.worker, again.worker)


@HANDSHAKE.clause("4.4-lease-not-agreed")
async def lease_not_agreed(trial: Trial) -> None:
    """EXIST with a lease is an UNEXPECTED_MESSAGE unless LEASES was agreed on."""
    peer = await trial.connect()
    raw = frame(Opcode.EXIST, vector(trial.namespace, trial.keys(1), argument=1000))
    await trial.expect_violation(peer, raw, ErrorCode.UNEXPECTED_MESSAGE)


@HANDSHAKE.clause("4.4-not-agreed")
async def not_agreed(trial: Trial) -> None:
    """What needs a feature that was not agreed on is an UNEXPECTED_MESSAGE."""
    keys = vector(trial.namespace, trial.keys(1))
    bodies = {
        Opcode.RELEASE: struct.pack("<IIQ", 1, 0, 1),
        Opcode.REGION_OPEN: struct.pack("<IIQ", 1, 0, 4096),
        Opcode.REGION_CLOSE: struct.pack("<II", 1, 0),
        Opcode.READ_REGION: keys + struct.pack("<IIQ", 1, 10, 0),
        Opcode.WRITE_REGION: keys + struct.pack("<IIQQ", 1, 10, 0, 0),
    }
    cases = {opcode.name: frame(opcode, body) for opcode, body in bodies.items()}
    await trial.expect_violations(cases, ErrorCode.UNEXPECTED_MESSAGE)


@HANDSHAKE.clause("8-token")
async def token(trial: Trial) -> None:
    """A token that is missing or wrong, even by one byte, is UNAUTHENTICATED, and the gateway closes."""
    trial.need(trial.token is not None, "no token was given, so none is expected to be wanted")
    right = trial.token or b""
    last = bytes([right[-1] ^ 1])
    wrong = {
        "no token": b"",
        "a token that lacks its last byte": right[:-1],
        "a token with a byte more": right + b"x",
        "a token with another last byte": right[:-1] + last,
    }
    cases = {name: frame(Opcode.HELLO, hello_body(token=each), request_id=0) for name, each in wrong.items()}
    await trial.expect_violations(cases, ErrorCode.UNAUTHENTICATED, is_greeted=False)


@HANDSHAKE.clause("10-full", level=Level.FULL)
async def full(trial: Trial) -> None:
    """A gateway at level full announces LEASES, REGIONS and CREDITS."""
    missing = [
        feature.name
        for feature in (Feature.LEASES, Feature.REGIONS, Feature.CREDITS)
        if not trial.welcome.features & feature
    ]
    if missing:
        raise Broken(
            f"features: expected LEASES, REGIONS and CREDITS, got none of {', '.join(map(str, missing))}"
        )
