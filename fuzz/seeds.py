"""Seeds: every published test vector, raw and in the sealed form, for every target."""

import json
from pathlib import Path

from adp_client.protocol.errors import LocalProtocolError

from .targets import TARGETS, unsealed

ROOT = Path(__file__).parent
VECTORS = ROOT.parent / "docs" / "spec" / "vectors"


def vector_frames() -> list[bytes]:
    """Frames with their payload, valid ones and violations."""
    found = []
    for name in ("valid.json", "invalid.json"):
        for row in json.loads((VECTORS / name).read_text()):
            found.append(bytes.fromhex(row["frame"]) + bytes.fromhex(row.get("payload", "")))
    return found


def seeds() -> list[bytes]:
    """What every target starts from."""
    made = [b"", b"\0"]
    for raw in vector_frames():
        made += [b"\x1e" + raw, b"\x02" + raw]
        if raw.startswith(b"ADP/\1"):
            try:
                made.append(b"\x1f" + unsealed(raw))
            except LocalProtocolError:
                continue  # a violation of the header: a seed as it is
    return made


def corpus(target: str) -> list[bytes]:
    """The inputs kept for a target: findings and what opened new paths."""
    if target not in TARGETS:
        raise ValueError(f"unknown target {target}; known: {', '.join(TARGETS)}")
    return [path.read_bytes() for path in sorted((ROOT / "corpus" / target).glob("*")) if path.is_file()]
