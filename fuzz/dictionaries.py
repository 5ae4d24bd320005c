"""Words for the fuzzer (libFuzzer's -dict): `python -m fuzz.dictionaries` writes `dictionaries/*.dict` anew.

They are made from the code, and a test compares, so a new opcode or key cannot be forgotten.
"""

from pathlib import Path

import attrs

from adp_client.config import BackoffConfig, ClientConfig, Timeouts
from adp_client.protocol.constants import (
    CRITICAL_EXTENSION,
    HANDSHAKE_BODY_BYTES,
    MAGIC,
    MAX_KEY_BYTES,
    MAX_TEXT_BYTES,
    NAMESPACE_BYTES,
    VERSION,
    ErrorCode,
    Feature,
    Flag,
    Opcode,
)
from adp_client.protocol.messages import Limits
from adp_engines.config import OffloadingConfig
from adp_gateway.store.format import RECORD_BYTES, SUPERBLOCK_NAME, UNIT_BYTES, data_name, journal_name
from adp_gateway.store.format import encode_superblock as superblock

from .images import base
from .sessions import LIMITS

MAX_WORD_BYTES = 64  # libFuzzer ignores longer ones
FOLDER = Path(__file__).parent / "dictionaries"


def _wire() -> dict[str, bytes]:
    words = {"magic": MAGIC, "magic_and_version": MAGIC + bytes([VERSION])}
    words |= {f"opcode_{opcode.name}": MAGIC + bytes([VERSION, opcode]) for opcode in Opcode}
    words |= {f"flag_{flag.name}": flag.to_bytes(2, "little") for flag in Flag}
    words |= {f"feature_{feature.name}": feature.to_bytes(8, "little") for feature in Feature}
    words |= {f"code_{code.name}": code.to_bytes(2, "little") for code in ErrorCode}
    words["critical_extension"] = CRITICAL_EXTENSION.to_bytes(2, "little")
    for whose, limits in (("", Limits()), ("small_", LIMITS)):
        for name, value in attrs.asdict(limits).items():
            words |= {
                f"{whose}{name}": value.to_bytes(4, "little"),
                f"above_{whose}{name}": (value + 1).to_bytes(4, "little"),
            }
    sizes = {
        "handshake_body_bytes": HANDSHAKE_BODY_BYTES,
        "max_text_bytes": MAX_TEXT_BYTES,
        "namespace_bytes": NAMESPACE_BYTES,
        "max_key_bytes": MAX_KEY_BYTES,
        "above_max_key_bytes": MAX_KEY_BYTES + 1,
        "most_u32": 2**32 - 1,
    }
    return words | {name: size.to_bytes(4, "little") for name, size in sizes.items()}


def _settings() -> dict[str, bytes]:
    keys = {
        field.name
        for cls in (ClientConfig, Timeouts, BackoffConfig, OffloadingConfig)
        for field in attrs.fields(cls)
    }
    words = {f"key_{key}": key.encode() for key in sorted(keys)}
    texts = (
        "tcp://",
        "tls://",
        "unix:///",
        "[::1]",
        ":65535",
        "null",
        "true",
        "1e400",
        "NaN",
        "\\ud800",
        '""',
        " = ",
    )
    words |= {f"text_{number:02}": text.encode() for number, text in enumerate(texts)}
    return words


def _image() -> dict[str, bytes]:
    words = {
        "superblock": superblock()[:16],
        "name_superblock": SUPERBLOCK_NAME.encode(),
        "name_data": data_name(1).encode(),
        "name_journal": journal_name(1).encode(),
        "unit_bytes": UNIT_BYTES.to_bytes(3, "little"),
        "record_bytes": RECORD_BYTES.to_bytes(3, "little"),
    }
    journal = base().files[journal_name(1)]
    words["header"] = journal[:32]
    words |= {
        f"record_{slot}": journal[slot * RECORD_BYTES :][:MAX_WORD_BYTES]
        for slot in range(1, len(journal) // RECORD_BYTES)
    }
    return words


def dictionaries() -> dict[str, str]:
    """File name to text; a target without a file of its own uses `wire.dict`."""
    words = {"wire": _wire(), "config": _settings(), "store_image": _image()}
    return {
        f"{file}.dict": "".join(_line(name, word) for name, word in each.items())
        for file, each in words.items()
    }


def _line(name: str, word: bytes) -> str:
    return f'{name}="' + "".join(f"\\x{byte:02X}" for byte in word) + '"\n'


def dictionary_of(target: str) -> Path:
    """The dictionary that a target is run with."""
    own = FOLDER / f"{target}.dict"
    return own if own.exists() else FOLDER / "wire.dict"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, text in dictionaries().items():
        (FOLDER / file_name).write_text(text)
