"""A case: the steps of one sequence, exactly as they go out. As a file it can be sent to somebody else."""

import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.constants import HEADER_BYTES
from adp_client.protocol.errors import LocalProtocolError
from adp_client.protocol.frames import check_body, decode_header, encode_header

FORMAT = 1
VERBS = ("dial", "send", "settle", "silence", "release", "drop")


class BadCaseFile(ValueError):
    """A file that holds no cases."""


@attrs.frozen(kw_only=True)
class Step:
    """One thing to do on one connection.

    dial     connect and send `data`, a HELLO; `how`: what must come, "welcome", "refusal" or "" for anything
    send     `data`, in pieces of the sizes in `pieces` (what is left in one), `pause_ms` between them
    settle   wait for every answer that is owed
    silence  say nothing for `pause_ms`
    release  give back all leases of this connection, in a request with id `request_id`
    drop     end the connection; `how`: "close" or "reset"
    """

    do: str = attrs.field(validator=attrs.validators.in_(VERBS))
    connection: int
    data: bytes = b""
    pieces: tuple[int, ...] = ()
    pause_ms: int = 0
    how: str = ""
    request_id: int = 0


@attrs.frozen(kw_only=True)
class Case:
    """One sequence. `namespaces` are the ones that its frames use, all its own."""

    number: int
    kind: str
    namespaces: tuple[bytes, ...]
    steps: tuple[Step, ...]


@attrs.frozen(kw_only=True)
class CaseFile:
    """What is needed to see a finding again."""

    finding: str
    seed: int
    gateway: dict[str, Any]
    cases: tuple[Case, ...]


def save(path: Path, file: CaseFile, expected: dict[int, Sequence[str]]) -> None:
    """Write it; `expected` has a sentence for each step of a case, by the case's number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = {
        "format": FORMAT,
        "finding": file.finding,
        "seed": file.seed,
        "gateway": file.gateway,
        "cases": [
            {
                "number": case.number,
                "kind": case.kind,
                "namespaces": [namespace.hex() for namespace in case.namespaces],
                "steps": [
                    _step_out(step, expected.get(case.number, ()), at) for at, step in enumerate(case.steps)
                ],
            }
            for case in file.cases
        ],
    }
    path.write_text(json.dumps(raw, indent=1) + "\n")


def _step_out(step: Step, expected: Sequence[str], at: int) -> dict[str, Any]:
    shown = attrs.asdict(step, filter=lambda field, value: value != field.default)
    if step.data:
        shown["data"] = step.data.hex()
    if at < len(expected):
        shown["expected"] = expected[at]
    return shown


def load(path: Path) -> CaseFile:
    """Read it. Raises OSError, or BadCaseFile that says what is wrong."""
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise BadCaseFile(f"{path} has format {raw['format']}, not {FORMAT}")
        return CaseFile(
            finding=raw["finding"],
            seed=raw["seed"],
            gateway=raw["gateway"],
            cases=tuple(
                Case(
                    number=case["number"],
                    kind=case["kind"],
                    namespaces=tuple(map(bytes.fromhex, case["namespaces"])),
                    steps=tuple(map(_step_in, case["steps"])),
                )
                for case in raw["cases"]
            ),
        )
    except BadCaseFile:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise BadCaseFile(f"{path} is no case file: {exc!r}") from None


def _step_in(raw: dict[str, Any]) -> Step:
    fields = {name: value for name, value in raw.items() if name != "expected"}
    if "data" in fields:
        fields["data"] = bytes.fromhex(fields["data"])
    fields["pieces"] = tuple(fields.get("pieces", ()))
    return Step(**fields)


def moved(case: Case, namespaces: Sequence[bytes]) -> Case:
    """The same case in other namespaces, so that nothing an earlier run has left is met again."""
    names = dict(zip(case.namespaces, namespaces, strict=True))
    steps = tuple(attrs.evolve(step, data=_renamed(step.data, names)) for step in case.steps)
    return attrs.evolve(case, namespaces=tuple(namespaces), steps=steps)


def _renamed(raw: bytes, names: dict[bytes, bytes]) -> bytes:
    """Replace names in whole frames and make their checksums right again; what is damaged stays damaged."""
    out, at = b"", 0
    while at < len(raw):
        try:
            header = decode_header(memoryview(raw[at : at + HEADER_BYTES].ljust(HEADER_BYTES, b"\0")))
            end = at + HEADER_BYTES + header.body_bytes
            body = raw[at + HEADER_BYTES : end]
            check_body(header, memoryview(body))
        except LocalProtocolError:
            break
        for old, new in names.items():
            body = body.replace(old, new)
        out += encode_header(attrs.evolve(header, body_crc=zlib.crc32(body))) + body
        payload = raw[end : end + header.payload_bytes]  # or other frames, if the header lies
        for old, new in names.items():
            payload = payload.replace(old, new)
        out += payload
        at = end + header.payload_bytes
    rest = raw[at:]
    for old, new in names.items():
        rest = rest.replace(old, new)
    return out + rest
