"""What the engine held before it was killed, as a file: one JSON line per block, and the bytes.

Written inside the engine's process (`driver.py`), read by the demo's (`scenario.py`). Standard library only.

    pages.jsonl   {"block_hash": hex, "group": int, "pages": [[layer, offset, length], ...]}
    pages.bin     the pages' bytes, where the lines say
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RecordedBlock:
    """One block of one KV cache group: the page of every layer of the group, in the group's layer order."""

    block_hash: bytes
    group: int
    pages: Mapping[str, bytes]

    @property
    def length_bytes(self) -> int:
        return sum(map(len, self.pages.values()))


def append(folder: Path, block: RecordedBlock) -> None:
    """Add one block to the record in `folder`."""
    with (folder / "pages.bin").open("ab") as data, (folder / "pages.jsonl").open("a") as index:
        pages = []
        for layer, page in block.pages.items():
            pages.append([layer, data.tell(), len(page)])
            data.write(page)
        index.write(
            json.dumps({"block_hash": block.block_hash.hex(), "group": block.group, "pages": pages}) + "\n"
        )


def load(folder: Path) -> Iterator[RecordedBlock]:
    """The recorded blocks, in the order in which they were recorded."""
    with (folder / "pages.bin").open("rb") as data, (folder / "pages.jsonl").open() as index:
        for line in index:
            raw = json.loads(line)
            pages = {}
            for layer, offset, length in raw["pages"]:
                data.seek(offset)
                pages[layer] = data.read(length)
            yield RecordedBlock(block_hash=bytes.fromhex(raw["block_hash"]), group=raw["group"], pages=pages)
