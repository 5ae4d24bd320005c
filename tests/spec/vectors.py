"""The test vectors of docs/spec: as JSON, and as messages. `python tests/spec/vectors.py` writes them anew.

Valid ones hold a message and its frame; invalid ones hold bytes and the code that they deserve; manifests
hold how an object is cut, what is stored for it, and where; the others are 64 bytes that are none.
"""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import attrs
import cattrs
import xxhash

from adp_client.fragments import MANIFEST_MAGIC, Manifest, checksum_of, cut_pieces, digest_of
from adp_client.protocol import ErrorCode, Feature, Opcode, Role, messages
from adp_client.protocol.codec import OPCODES, encode_body
from adp_client.protocol.constants import WORKERS_EXTENSION, Flag
from adp_client.protocol.frames import FrameHeader, encode_header
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Extension,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadItems,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Release,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
    WriteRegion,
    payload_lengths,
)
from adp_client.protocol.workers import Place, WorkerMap, encode_worker_map

VECTORS = Path(__file__).parents[2] / "docs" / "spec" / "vectors"

converter = cattrs.Converter(forbid_extra_keys=True)
converter.register_unstructure_hook(bytes, bytes.hex)
converter.register_structure_hook(bytes, lambda value, _: bytes.fromhex(value))
converter.register_unstructure_hook(ErrorCode, lambda code: code.name)
converter.register_structure_hook(ErrorCode, lambda value, _: ErrorCode[value])
converter.register_unstructure_hook(Feature, lambda bits: [f.name for f in Feature if f in bits])


def _feature(value: list[str], _: type) -> Feature:
    bits = Feature.NONE
    for name in value:
        bits |= Feature[name]
    return bits


converter.register_structure_hook(Feature, _feature)
# By item in the published file: by column is this implementation's affair.
converter.register_unstructure_hook(ReadItems, lambda items: converter.unstructure(list(items)))
converter.register_structure_hook(
    ReadItems, lambda value, _: messages.read_items(converter.structure(value, list[ReadItem]))
)

NAMESPACE = bytes(range(32))
KEYS = (bytes(range(100, 140)), bytes(range(140, 180)))
BOOT = bytes(range(16))
HELLO = b"hello"
WORLD = b"world!"
# XXH3-64 of the two, as a writer would send them (the frame level does not compute checksums).
HELLO_SUM, WORLD_SUM = 0x9555E8555C62DCFD, 0xAFC23CEF9D305125


@attrs.frozen(kw_only=True)
class Vector:
    """One valid frame."""

    name: str
    opcode: str
    flags: list[str]
    request_id: int
    type: str
    message: dict[str, Any]
    frame: bytes
    payload: bytes = b""

    def value(self) -> Message:
        return converter.structure(self.message, getattr(messages, self.type))


@attrs.frozen(kw_only=True)
class Violation:
    """Bytes that end a connection, for a peer that expects them after `after` (names of valid vectors)."""

    name: str
    role: str
    after: list[str]
    frame: bytes
    code: str


@attrs.frozen(kw_only=True)
class ManifestVector:
    """An object, cut into fragments of `fragment_bytes` and stored under `key` (section 5.13)."""

    name: str
    key: bytes
    data: bytes
    fragment_bytes: int
    checksums: list[int]
    manifest: bytes
    fragment_keys: list[bytes]


@attrs.frozen(kw_only=True)
class WorkerVector:
    """Which worker keeps the objects under `key` (section 4.5)."""

    key: bytes
    workers: int
    worker: int


@attrs.frozen(kw_only=True)
class ManifestViolation:
    """64 bytes that are CORRUPT, or an object like any other (OK)."""

    name: str
    data: bytes
    status: str


def frame_bytes(message: Message, *, request_id: int, is_reply: bool, more: bool, opcode: Opcode) -> bytes:
    body = encode_body(message)
    flags = (Flag.REPLY if is_reply else Flag.NONE) | (Flag.MORE if more else Flag.NONE)
    header = FrameHeader(
        opcode=opcode,
        flags=flags,
        request_id=request_id,
        body_bytes=len(body),
        payload_bytes=sum(payload_lengths(message)),
        body_crc=zlib.crc32(body),
    )
    return encode_header(header) + body


_WORKER_MAPS = {
    "welcome-workers-by-port": WorkerMap(
        gateway_id=bytes(range(16, 32)), places=(Place(port=7172), Place(port=7173), Place(port=80)), worker=2
    ),
    "welcome-workers-by-name": WorkerMap(
        gateway_id=bytes(range(16, 32)), places=(Place(name="kv.sock.0"), Place(name="kv.sock.1")), worker=0
    ),
}


def _valid() -> list[Vector]:
    made: list[Vector] = []

    def add(
        name: str,
        message: Message,
        request_id: int = 7,
        *,
        answers: Opcode | None = None,
        more: bool = False,
        payload: bytes = b"",
    ) -> None:
        opcode = OPCODES[type(message)] if answers is None else answers
        flags = (["REPLY"] if answers is not None else []) + (["MORE"] if more else [])
        made.append(
            Vector(
                name=name,
                opcode=opcode.name,
                flags=flags,
                request_id=request_id,
                type=type(message).__name__,
                message=converter.unstructure(message),
                frame=frame_bytes(
                    message, request_id=request_id, is_reply=answers is not None, more=more, opcode=opcode
                ),
                payload=payload,
            )
        )

    every = Feature.LEASES | Feature.REGIONS | Feature.FRAGMENTS | Feature.CREDITS | Feature.END_TO_END
    add("hello-plain", Hello(agent="example/1"), 0)
    add(
        "hello-full",
        Hello(
            max_version=3,
            features=every,
            max_body_bytes=65536,
            max_payload_bytes=1 << 24,
            token=b"s3cret",
            agent="example/1",
            extensions=(Extension(tag=1, data=b"skipped"), Extension(tag=2, data=b"")),
        ),
        0,
    )
    add("welcome-plain", Welcome(boot_id=BOOT, agent="gateway/1"), 0, answers=Opcode.HELLO)
    add(
        "welcome-full",
        Welcome(boot_id=BOOT, features=every, limits=Limits(max_items=5, max_lease_ms=9)),
        0,
        answers=Opcode.HELLO,
    )
    for name, told in _WORKER_MAPS.items():
        welcome = Welcome(boot_id=BOOT, agent="gateway/1", extensions=(encode_worker_map(told),))
        add(name, welcome, 0, answers=Opcode.HELLO)
    add("exist", Exist(namespace=NAMESPACE, keys=KEYS))
    add("exist-lease", Exist(namespace=NAMESPACE, keys=KEYS, lease_ms=2500))
    add("exist-one-byte-key", Exist(namespace=NAMESPACE, keys=(b"k",)))
    add("exist-longest-key", Exist(namespace=NAMESPACE, keys=(b"k" * 128,)))
    add("exist-reply", ExistReply(statuses=b"\0\1"), answers=Opcode.EXIST)
    add("exist-reply-part", ExistReply(first=1, statuses=b"\1"), answers=Opcode.EXIST, more=True)
    add("exist-reply-lease", ExistReply(statuses=b"\0\1", lease_id=77, lease_ms=2000), answers=Opcode.EXIST)
    add("read", Read(namespace=NAMESPACE, keys=KEYS, capacities=(5, 262144)))
    add(
        "read-reply",
        ReadReply(
            items=(
                ReadItem(index=1, object_bytes=6, length=6, checksum=WORLD_SUM),
                ReadItem(index=0, status=ErrorCode.NOT_FOUND),
            )
        ),
        answers=Opcode.READ,
        payload=WORLD,
    )
    add(
        "read-reply-part-1",
        ReadReply(items=(ReadItem(index=0, object_bytes=5, length=2, checksum=HELLO_SUM),)),
        answers=Opcode.READ,
        more=True,
        payload=HELLO[:2],
    )
    add(
        "read-reply-part-2",
        ReadReply(
            items=(
                ReadItem(index=0, object_bytes=5, offset=2, length=3, checksum=HELLO_SUM),
                ReadItem(index=1, status=ErrorCode.TOO_LARGE, object_bytes=300000),
            )
        ),
        answers=Opcode.READ,
        payload=HELLO[2:],
    )
    add(
        "write",
        Write(
            namespace=NAMESPACE,
            keys=KEYS,
            items=(
                WriteItem(object_bytes=5, length=5, checksum=HELLO_SUM),
                WriteItem(object_bytes=6, length=6, checksum=WORLD_SUM),
            ),
        ),
        payload=HELLO + WORLD,
    )
    add(
        "write-spanning-1",
        Write(
            namespace=NAMESPACE,
            keys=KEYS[:1],
            items=(WriteItem(object_bytes=5, length=2, checksum=HELLO_SUM),),
        ),
        more=True,
        payload=HELLO[:2],
    )
    add(
        "write-spanning-2",
        Write(
            namespace=NAMESPACE,
            keys=KEYS[:1],
            items=(WriteItem(object_bytes=5, offset=2, length=3, checksum=HELLO_SUM),),
        ),
        payload=HELLO[2:],
    )
    add(
        "write-empty-object",
        Write(
            namespace=NAMESPACE,
            keys=KEYS[:1],
            items=(WriteItem(object_bytes=0, length=0, checksum=0x2D06800538D394C2),),
        ),
    )
    for code in ErrorCode:
        if code.ends_connection:
            add(f"error-{code.name.lower()}", ErrorMessage(code=code, text="why"), 0)
        elif code is not ErrorCode.OK:
            name = code.name.lower()
            add(f"refusal-{name}", StatusReply(status=code), answers=Opcode.WRITE)
            add(f"item-{name}", StatusReply(statuses=bytes([0, code])), answers=Opcode.WRITE)
    add(
        "refusal-retry-after",
        StatusReply(status=ErrorCode.OVERLOADED, retry_after_ms=250),
        answers=Opcode.DELETE,
    )
    add("delete", Delete(namespace=NAMESPACE, keys=KEYS))
    add("delete-reply", StatusReply(statuses=b"\0\1"), answers=Opcode.DELETE)
    add("check", Check(namespace=NAMESPACE, keys=KEYS))
    add("check-reply", StatusReply(statuses=b"\0\2"), answers=Opcode.CHECK)
    add("fence", Fence())
    add("fence-reply", StatusReply(), answers=Opcode.FENCE)
    add("ping", Ping(nonce=0x0123456789ABCDEF))
    add("pong", Pong(nonce=0x0123456789ABCDEF), answers=Opcode.PING)
    add("goodbye", Goodbye())
    add("goodbye-reply", GoodbyeReply(), answers=Opcode.GOODBYE)
    add("goodbye-drain", Goodbye(code=ErrorCode.SHUTTING_DOWN, text="restarting"), 0)
    add("release", Release(lease_ids=(77, 78)))
    add("release-reply", StatusReply(statuses=b"\0\5"), answers=Opcode.RELEASE)
    add("region-open", RegionOpen(region=3, region_bytes=1 << 32))
    add("region-open-reply", StatusReply(), answers=Opcode.REGION_OPEN)
    add("region-close", RegionClose(region=3))
    add("region-close-reply", StatusReply(), answers=Opcode.REGION_CLOSE)
    add(
        "read-region",
        ReadRegion(
            namespace=NAMESPACE,
            keys=KEYS,
            targets=(
                RegionTarget(region=3, offset=0, capacity=5),
                RegionTarget(region=3, offset=1 << 31, capacity=262144),
            ),
        ),
    )
    add(
        "read-region-reply",
        ReadRegionReply(
            items=(
                ReadItem(index=0, object_bytes=5, length=5, checksum=HELLO_SUM),
                ReadItem(index=1, status=ErrorCode.CORRUPT),
            )
        ),
        answers=Opcode.READ_REGION,
    )
    add(
        "write-region",
        WriteRegion(
            namespace=NAMESPACE,
            keys=KEYS[:1],
            sources=(RegionSource(region=3, offset=4096, length=5, checksum=HELLO_SUM),),
        ),
    )
    add("write-region-reply", StatusReply(statuses=b"\0"), answers=Opcode.WRITE_REGION)
    add("credit", Credit(requests=64, inflight_bytes=1 << 28), 0)
    return made


def _invalid(valid: dict[str, Vector]) -> list[Violation]:
    made: list[Violation] = []
    opened = ["hello-plain", "welcome-plain"]

    def add(name: str, frame: bytes, code: ErrorCode, *, role: Role = Role.GATEWAY, after: list[str]) -> None:
        made.append(Violation(name=name, role=role.value, after=after, frame=frame, code=code.name))

    def header(**changes: Any) -> bytes:
        fields: dict[str, Any] = {"opcode": Opcode.FENCE, "request_id": 1}
        return encode_header(FrameHeader(**{**fields, **changes}))

    def reseal(raw: bytes) -> bytes:
        return raw[:28] + zlib.crc32(raw[:28]).to_bytes(4, "little") + raw[32:]

    def with_body(opcode: Opcode, body: bytes, flags: Flag = Flag.NONE, payload_bytes: int = 0) -> bytes:
        crc = zlib.crc32(body)
        return (
            header(
                opcode=opcode, flags=flags, body_bytes=len(body), body_crc=crc, payload_bytes=payload_bytes
            )
            + body
        )

    hello = valid["hello-plain"].frame
    exist = encode_body(Exist(namespace=NAMESPACE, keys=KEYS))
    add("other-protocol", b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", ErrorCode.BAD_MAGIC, after=[])
    add(
        "later-version",
        reseal(hello[:4] + b"\x02" + hello[5:]),
        ErrorCode.UNSUPPORTED_VERSION,
        after=[],
    )
    add("header-bit-flipped", hello[:9] + b"\x01" + hello[10:], ErrorCode.BAD_CHECKSUM, after=[])
    add("body-bit-flipped", hello[:-1] + bytes([hello[-1] ^ 1]), ErrorCode.BAD_CHECKSUM, after=[])
    fence = header()
    add("opcode-0", reseal(fence[:5] + b"\x00" + fence[6:]), ErrorCode.UNKNOWN_OPCODE, after=opened)
    add("opcode-200", reseal(fence[:5] + b"\xc8" + fence[6:]), ErrorCode.UNKNOWN_OPCODE, after=opened)
    add("unknown-flag", reseal(fence[:6] + b"\x04\x00" + fence[8:]), ErrorCode.MALFORMED, after=opened)
    add(
        "handshake-body-too-large",
        header(opcode=Opcode.HELLO, request_id=0, body_bytes=65537),
        ErrorCode.LIMIT_EXCEEDED,
        after=[],
    )
    add(
        "payload-in-handshake",
        header(opcode=Opcode.HELLO, request_id=0, payload_bytes=1),
        ErrorCode.LIMIT_EXCEEDED,
        after=[],
    )
    add("body-4-gib", header(body_bytes=0xFFFFFFFF), ErrorCode.LIMIT_EXCEEDED, after=opened)
    add("payload-4-gib", header(payload_bytes=0xFFFFFFFF), ErrorCode.LIMIT_EXCEEDED, after=opened)
    add("fence-with-body", with_body(Opcode.FENCE, b"x"), ErrorCode.MALFORMED, after=opened)
    add("exist-cut-short", with_body(Opcode.EXIST, exist[:-1]), ErrorCode.MALFORMED, after=opened)
    add("exist-trailing-byte", with_body(Opcode.EXIST, exist + b"\0"), ErrorCode.MALFORMED, after=opened)
    add("exist-no-keys", with_body(Opcode.EXIST, exist[:32] + bytes(16)), ErrorCode.MALFORMED, after=opened)
    add(
        "exist-key-of-0-bytes",
        with_body(Opcode.EXIST, exist[:32] + b"\1\0\0\0" + bytes(12)),
        ErrorCode.LIMIT_EXCEEDED,
        after=opened,
    )
    add(
        "exist-count-of-4-billion",
        with_body(Opcode.EXIST, exist[:32] + b"\xff\xff\xff\xff" + exist[36:]),
        ErrorCode.MALFORMED,
        after=opened,
    )
    add(
        "exist-reserved-set",
        with_body(Opcode.EXIST, exist[:38] + b"\1" + exist[39:]),
        ErrorCode.MALFORMED,
        after=opened,
    )
    add("exist-lease-not-agreed", valid["exist-lease"].frame, ErrorCode.UNEXPECTED_MESSAGE, after=opened)
    add("region-not-agreed", valid["region-open"].frame, ErrorCode.UNEXPECTED_MESSAGE, after=opened)
    add("request-before-hello", valid["exist"].frame, ErrorCode.UNEXPECTED_MESSAGE, after=[])
    add("hello-twice", hello, ErrorCode.UNEXPECTED_MESSAGE, after=opened)
    add("reply-to-a-gateway", valid["exist-reply"].frame, ErrorCode.UNEXPECTED_MESSAGE, after=opened)
    add("continues-nothing", valid["write-spanning-2"].frame, ErrorCode.MALFORMED, after=opened)
    add(
        "payload-of-another-size",
        with_body(Opcode.FENCE, b"", payload_bytes=5),
        ErrorCode.MALFORMED,
        after=opened,
    )
    add("same-id-twice", valid["ping"].frame, ErrorCode.UNEXPECTED_MESSAGE, after=[*opened, "ping"])
    add(
        "reply-to-nothing",
        valid["pong"].frame,
        ErrorCode.UNEXPECTED_MESSAGE,
        role=Role.CLIENT,
        after=opened,
    )
    add(
        "reply-of-another-verb",
        frame_bytes(Pong(), request_id=1, is_reply=True, more=False, opcode=Opcode.PING),
        ErrorCode.UNEXPECTED_MESSAGE,
        role=Role.CLIENT,
        after=[*opened, "exist"],
    )
    add(
        "feature-not-offered",
        valid["welcome-full"].frame,
        ErrorCode.MALFORMED,
        role=Role.CLIENT,
        after=["hello-plain"],
    )
    head = bytes(16)
    port, other = b"\1\0\0\0", b"\2\0\0\0"
    for name, data in {
        "workers-none": head + bytes(8),
        "workers-one": head + b"\1\0\0\0\0\0\0\0" + port,
        "workers-257": head
        + b"\1\1\0\0\0\0\0\0"
        + b"".join(struct.pack("<HH", at, 0) for at in range(1, 258)),
        "workers-no-such-worker": head + b"\2\0\2\0\0\0\0\0" + port + other,
        "workers-reserved-set": head + b"\2\0\0\0\1\0\0\0" + port + other,
        "workers-cut-short": head + b"\2\0\0\0\0\0\0\0" + port + other[:-1],
        "workers-trailing-byte": head + b"\2\0\0\0\0\0\0\0" + port + other + b"\0",
        "workers-no-place": head + b"\2\0\0\0\0\0\0\0" + port + bytes(4),
        "workers-port-and-name": head + b"\2\0\0\0\0\0\0\0" + port + b"\2\0\1\0k",
        "workers-two-in-one-place": head + b"\2\0\0\0\0\0\0\0" + port + port,
        "workers-name-cut-short": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\2\0k",
        "workers-name-of-108-bytes": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\x6c\0" + b"k" * 108,
        "workers-name-leads-elsewhere": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\3\0../",
        "workers-name-is-a-directory": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\2\0..",
        "workers-name-with-a-zero": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\2\0k\0",
        "workers-name-is-no-text": head + b"\2\0\0\0\0\0\0\0" + port + b"\0\0\1\0\xff",
        "workers-head-cut-short": head,
    }.items():
        _add_workers(made, name, Extension(tag=WORKERS_EXTENSION, data=data))
    _add_workers(made, "workers-twice", *[encode_worker_map(each) for each in _WORKER_MAPS.values()])
    return made


def _add_workers(made: list[Violation], name: str, *extensions: Extension) -> None:
    welcome = Welcome(boot_id=BOOT, extensions=extensions)
    frame = frame_bytes(welcome, request_id=0, is_reply=True, more=False, opcode=Opcode.HELLO)
    role, after = Role.CLIENT.value, ["hello-plain"]
    made.append(Violation(name=name, role=role, after=after, frame=frame, code=ErrorCode.MALFORMED.name))


def _workers() -> list[WorkerVector]:
    return [
        WorkerVector(key=key, workers=count, worker=xxhash.xxh3_64_intdigest(key) % count)
        for key in (*KEYS, b"k", b"\0", bytes(128))
        for count in (2, 3, 8, 256)
    ]


def _manifests() -> list[ManifestVector]:
    counted = bytes(at % 251 for at in range(1000))
    made = []
    for name, key, data, size in [
        ("even", KEYS[0], counted[:300], 100),
        ("rest", KEYS[0], counted, 300),
        ("other-version", KEYS[0], counted[:-1] + b"!", 300),
        ("other-key", b"k", counted, 300),
        ("single", KEYS[1], counted[:65], 65),
        ("looks-like-a-manifest", KEYS[1], MANIFEST_MAGIC + counted[:48], 64),
    ]:
        checksums = [checksum_of(pieces) for pieces in cut_pieces([memoryview(data)], size)]
        manifest = Manifest(object_bytes=len(data), fragment_bytes=size, digest=digest_of(checksums))
        made.append(
            ManifestVector(
                name=name,
                key=key,
                data=data,
                fragment_bytes=size,
                checksums=checksums,
                manifest=manifest.encode(),
                fragment_keys=manifest.keys(key),
            )
        )
    return made


def _manifest_violations() -> list[ManifestViolation]:
    sound = (300, 100, 3, 0, 7, bytes(16))

    def raw(place: int | None = None, value: int | bytes = 0, *, magic: bytes = MANIFEST_MAGIC) -> bytes:
        fields = [*sound]
        if place is not None:
            fields[place] = value
        head = struct.pack("<16sIIIIQ16s", magic, *fields)
        return head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head))

    return [
        ManifestViolation(name=name, data=data, status=status)
        for name, data, status in [
            ("object-too-small", raw(0, 63), "CORRUPT"),
            ("no-fragment-bytes", raw(1, 0), "CORRUPT"),
            ("fragment-above-object", raw(1, 301), "CORRUPT"),
            ("wrong-count", raw(2, 4), "CORRUPT"),
            ("reserved-set", raw(3, 1), "CORRUPT"),
            ("zeros-set", raw(5, bytes(15) + b"\1"), "CORRUPT"),
            ("other-magic", raw(magic=b"ADP/ no manifest"), "OK"),
            ("wrong-check", raw()[:-1] + b"\0", "OK"),
        ]
    ]


def dump(files: dict[str, list[Any]]) -> dict[str, str]:
    """File name -> text."""
    return {
        name: json.dumps([converter.unstructure(row) for row in rows], indent=1) + "\n"
        for name, rows in files.items()
    }


def generate() -> dict[str, str]:
    valid = _valid()
    return dump(
        {
            "valid.json": valid,
            "invalid.json": _invalid({vector.name: vector for vector in valid}),
            "manifests.json": _manifests(),
            "no-manifests.json": _manifest_violations(),
            "workers.json": _workers(),
        }
    )


def load() -> tuple[list[Vector], list[Violation]]:
    valid = converter.structure(json.loads((VECTORS / "valid.json").read_text()), list[Vector])
    invalid = converter.structure(json.loads((VECTORS / "invalid.json").read_text()), list[Violation])
    return valid, invalid


def load_manifests() -> tuple[list[ManifestVector], list[ManifestViolation]]:
    manifests = json.loads((VECTORS / "manifests.json").read_text())
    others = json.loads((VECTORS / "no-manifests.json").read_text())
    return (
        converter.structure(manifests, list[ManifestVector]),
        converter.structure(others, list[ManifestViolation]),
    )


def load_workers() -> list[WorkerVector]:
    return converter.structure(json.loads((VECTORS / "workers.json").read_text()), list[WorkerVector])


if __name__ == "__main__":
    for file_name, content in generate().items():
        (VECTORS / file_name).write_text(content)
