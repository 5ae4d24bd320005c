"""Sizes as people write them."""

import re

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def size_of(text: str) -> int:
    """`100GiB`, `512M`, `4096`: bytes, in powers of 1024. Raises ValueError."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size: write 100GiB, 512MiB or a number of bytes")
    return int(match[1]) << _UNITS[match[2].upper()]
