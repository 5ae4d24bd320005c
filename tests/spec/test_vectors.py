"""The published vectors against the implementation, and against the spec's tables."""

import hashlib
import re
from pathlib import Path

import pytest
import xxhash

from adp_client.fragments import MANIFEST_BYTES, MANIFEST_MAGIC, MAX_FRAGMENTS, Manifest, UnsoundManifest
from adp_client.placing import workers_of
from adp_client.protocol import Connection, ErrorCode, Opcode, Role
from adp_client.protocol.codec import LAYOUT_BYTES, decode_body, encode_body
from adp_client.protocol.constants import (
    HEADER_BYTES,
    MAX_PLACE_NAME_BYTES,
    MAX_WORKERS,
    WORKERS_EXTENSION,
    Flag,
)
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.frames import decode_header
from adp_client.protocol.messages import Hello, Welcome, payload_lengths
from adp_client.protocol.state import TRANSITIONS, State, Step
from protocol.wire import pair, receive
from spec.vectors import VECTORS, Vector, Violation, generate, load_manifests, load_workers

SPEC = (VECTORS.parent / "adp-1.md").read_text()


def test_decodes(vector: Vector) -> None:
    raw = memoryview(vector.frame)
    header = decode_header(raw[:HEADER_BYTES])
    message = decode_body(header.opcode, Flag.REPLY in header.flags, raw[HEADER_BYTES:])
    assert message == vector.value()
    assert header.opcode.name == vector.opcode
    assert [flag.name for flag in Flag if flag and flag in header.flags] == vector.flags
    assert header.request_id == vector.request_id
    assert header.payload_bytes == sum(payload_lengths(message)) == len(vector.payload)


def test_encodes(vector: Vector) -> None:
    assert encode_body(vector.value()) == vector.frame[HEADER_BYTES:]


def test_payload_checksums(vector: Vector) -> None:
    """Vectors that carry whole objects carry their true XXH3-64."""
    message = vector.value()
    lengths = payload_lengths(message)
    at = 0
    for item, length in zip(message.items if lengths else (), lengths, strict=True):
        if length == item.object_bytes and length:
            assert xxhash.xxh3_64_intdigest(vector.payload[at : at + length]) == item.checksum
        at += length


def test_violations(violation: Violation, valid: dict[str, Vector]) -> None:
    connection = Connection(Role(violation.role))
    for name in violation.after:
        if connection.role is Role.CLIENT:
            message = valid[name].value()
            if isinstance(message, Hello):
                connection.hello(message)
            elif isinstance(message, Welcome):
                list(receive(connection, valid[name].frame))
            else:
                connection.request(message)  # type: ignore[arg-type]
        else:
            if valid[name].type == "Welcome":
                connection.accept(valid[name].value())  # type: ignore[arg-type]
                continue
            list(receive(connection, valid[name].frame + valid[name].payload))
    with pytest.raises(RemoteProtocolError) as caught:
        list(receive(connection, violation.frame))
    assert caught.value.code.name == violation.code
    assert connection.state is State.FAILED


def test_cover_every_opcode_and_code(valid: dict[str, Vector]) -> None:
    assert {vector.opcode for vector in valid.values()} == {opcode.name for opcode in Opcode}
    told: set[str] = set()
    for vector in valid.values():
        message = vector.value()
        told.add(getattr(message, "status", getattr(message, "code", ErrorCode.OK)).name)
        told.update(ErrorCode(byte).name for byte in getattr(message, "statuses", b""))
    assert told == {code.name for code in ErrorCode}


def test_files_are_what_the_generator_makes() -> None:
    for name, content in generate().items():
        assert (VECTORS / name).read_text() == content, f"{name}: run python -m spec.vectors in tests/"


def test_manifests() -> None:
    """From the spec's words alone, and by the implementation."""
    manifests, others = load_manifests()
    for each in manifests:
        starts = range(0, len(each.data), each.fragment_bytes)
        fragments = [each.data[at : at + each.fragment_bytes] for at in starts]
        assert [xxhash.xxh3_64_intdigest(fragment) for fragment in fragments] == each.checksums
        sums = b"".join(checksum.to_bytes(8, "little") for checksum in each.checksums)
        numbers = (len(each.data), each.fragment_bytes, len(fragments), 0)
        head = MANIFEST_MAGIC + b"".join(number.to_bytes(4, "little") for number in numbers)
        head += xxhash.xxh3_64_intdigest(sums).to_bytes(8, "little") + bytes(16)
        assert each.manifest == head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")
        assert each.fragment_keys == [
            hashlib.sha256(each.manifest + each.key + at.to_bytes(4, "little")).digest()
            for at in range(len(fragments))
        ]
        manifest = Manifest.decode(each.manifest)
        assert manifest is not None
        assert manifest.keys(each.key) == each.fragment_keys
        assert manifest.sizes() == [len(fragment) for fragment in fragments]
    for other in others:
        assert len(other.data) == MANIFEST_BYTES
        if other.status == "OK":
            assert Manifest.decode(other.data) is None
        else:
            with pytest.raises(UnsoundManifest):
                Manifest.decode(other.data)
    assert MANIFEST_MAGIC.hex(" ") in SPEC
    assert f"at most {MAX_FRAGMENTS:,}" in SPEC
    assert f"An object of exactly {MANIFEST_BYTES} bytes" in SPEC


def test_workers() -> None:
    for each in load_workers():
        assert list(workers_of([each.key], each.workers)) == [each.worker]
    assert f"{MAX_WORKERS} workers" in SPEC
    assert f"1 to {MAX_PLACE_NAME_BYTES} bytes" in SPEC
    assert f"tag {WORKERS_EXTENSION:#x}" in SPEC


def test_valid_frames_survive_a_connection_byte_by_byte(valid: dict[str, Vector]) -> None:
    """The requests that need no feature, over a gateway core, one byte at a time."""
    for vector in valid.values():
        if "REPLY" in vector.flags or vector.request_id == 0 or vector.name in _NEED_FEATURES:
            continue
        if vector.name == "write-spanning-2":
            continue
        _, gateway = pair()
        events = list(receive(gateway, vector.frame + vector.payload, chunk=1))
        assert events[-1].message == vector.value()  # type: ignore[union-attr]


_NEED_FEATURES = {
    "exist-lease",
    "release",
    "region-open",
    "region-close",
    "read-region",
    "write-region",
}


def test_spec_tables_match_the_code() -> None:
    codes = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (?:item|connection)", SPEC, re.M))
    assert codes == {str(code.value): code.name for code in ErrorCode}
    opcodes = dict(re.findall(r"^\| (\d+) \| ([A-Z_]+) \| (?!item|connection)", SPEC, re.M))
    assert opcodes == {str(opcode.value): opcode.name for opcode in Opcode}
    states = set(re.findall(r"^\| (client|gateway) \| (\w+) \| ([^|]+) \| (\w+) \|", SPEC, re.M))
    everywhere = {Step.SEND_ERROR, Step.RECEIVE_ERROR, Step.RECEIVE_EOF, Step.VIOLATION}
    assert states == {
        (role.value, state.value, step.value, following.value)
        for role, table in TRANSITIONS.items()
        for state, steps in table.items()
        for step, following in steps.items()
        if step not in everywhere and state not in (State.CLOSED, State.FAILED)
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hello", "HELLO (28 bytes"),
        ("welcome", "WELCOME (80 bytes"),
        ("vector head", "The head has 48 bytes"),
        ("read item", "A read item is 32 bytes"),
        ("write item", "A write item is 24 bytes"),
    ],
)
def test_spec_sizes_match_the_code(name: str, words: str) -> None:
    assert words in SPEC
    assert str(LAYOUT_BYTES[name]) in words


def test_code_cites_sections_that_exist() -> None:
    sections = set(re.findall(r"^#+ (\d+(?:\.\d+)?)", SPEC, re.M))
    package = Path(__file__).parents[2] / "adp_client"
    for module in package.rglob("*.py"):
        for number in re.findall(r"[Ss]ections? (\d+(?:\.\d+)?)", module.read_text()):
            assert number in sections, f"{module.name} cites section {number}"
