"""What each target starts from: the published test vectors, valid settings, a store changed, the corpus."""

import contextlib
import json
from pathlib import Path
from typing import Any

import attrs

from adp_client.config import ClientConfig
from adp_client.protocol.errors import LocalProtocolError
from adp_engines.config import OffloadingConfig

from .images import MUTATIONS, base
from .sealing import unsealed
from .targets import TARGETS

ROOT = Path(__file__).parent
VECTORS = ROOT.parent / "docs" / "spec" / "vectors"
#: Found in earlier runs on this machine; what is worth keeping for everybody stands in `corpus`.
GROWN = ROOT / "findings" / "grown"


def vector_frames() -> list[bytes]:
    """Frames with their payload, valid ones and violations."""
    found = []
    for name in ("valid.json", "invalid.json"):
        for row in json.loads((VECTORS / name).read_text()):
            found.append(bytes.fromhex(row["frame"]) + bytes.fromhex(row.get("payload", "")))
    return found


def seeds(target: str) -> list[bytes]:
    """What `target` starts from when nothing has been found yet."""
    made = [b"", b"\0"]
    if target == "config":
        return made + _settings()
    if target == "store_image":
        return made + _images()
    for raw in vector_frames():
        spelled = [b"\x1e" + raw, b"\x02" + raw]
        if raw.startswith(b"ADP/\1"):
            with contextlib.suppress(LocalProtocolError):  # a violation of the header: a seed as it is
                spelled.append(b"\x1f" + unsealed(raw))
        # A session's second byte: whether its client falls silent.
        made += [each[:1] + b"\0" + each[1:] if target == "session" else each for each in spelled]
    return made


def _settings() -> list[bytes]:
    """Every key with its default, in JSON and in TOML, and endpoints."""
    made = []
    endpoint = "tcp://127.0.0.1:7171"
    for whose, settings in (
        (0, attrs.asdict(ClientConfig(endpoint=endpoint, token="token"))),
        (2, attrs.asdict(OffloadingConfig(token="token", model_id="model"))),
    ):
        made.append(bytes([whose << 1]) + json.dumps(settings).encode())
        made.append(bytes([whose << 1 | 1]) + _toml(settings).encode())
    for text in (endpoint, "tcp://[::1]:0", "tcp://localhost:65535", "unix:///run/adp.sock"):
        made.append(b"\x06" + text.encode())
    return made


def _toml(settings: dict[str, Any]) -> str:
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if name not in tables]
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    return "\n".join(lines)


def _images() -> list[bytes]:
    """Each mutation once with small numbers, and valid files as raw input."""
    files = base().files
    made = [bytes([0, number, 1, *range(24)]) for number in range(len(MUTATIONS))]
    made += [b"\1" + contents for name, contents in sorted(files.items()) if name.endswith(".log")]
    return [*made, b"\2" + files["superblock"][:16]]


def corpus(target: str) -> list[bytes]:
    """The inputs kept for a target: findings and what opened new paths."""
    if target not in TARGETS:
        raise ValueError(f"unknown target {target}; known: {', '.join(TARGETS)}")
    return [path.read_bytes() for path in sorted((ROOT / "corpus" / target).glob("*")) if path.is_file()]
