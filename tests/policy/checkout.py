"""The checkout under the tests: where it is and which files belong to it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("adp_client", "adp_gateway", "adp_engines")


def files(*patterns: str) -> Iterator[Path]:
    """The files git would commit (tracked or new), matching any of the patterns (git pathspecs)."""
    command = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *patterns,
    ]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listing.split("\0")):
        path = ROOT / name
        if path.is_file():  # deleted and not yet committed
            yield path
