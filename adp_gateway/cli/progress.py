"""Progress of a long run, on standard error: a line that changes on a terminal, else one now and then."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

import attrs

TERMINAL_SECONDS = 0.2
FILE_SECONDS = 10.0
_CLEAR = "\r\x1b[K"


@attrs.define
class Progress:
    """Call it with what is done and all there is, in bytes, as often as you like."""

    what: str
    stream: TextIO = attrs.field(factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    _began: float = attrs.field(init=False)
    _told: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._began = self._told = self.clock()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Tell, if it is time to."""
        now = self.clock()
        is_terminal = self.stream.isatty()
        if now - self._told < (TERMINAL_SECONDS if is_terminal else FILE_SECONDS):
            return
        self._told = now
        rate = done_bytes / max(now - self._began, 1e-9)
        left = f", {duration((total_bytes - done_bytes) / rate)} left" if rate > 0 else ""
        line = f"{self.what}: {size(done_bytes)} of {size(total_bytes)}, {size(rate)}/s{left}"
        self.stream.write(f"{_CLEAR}{line}" if is_terminal else f"{line}\n")
        self.stream.flush()

    def finish(self) -> None:
        """Leave nothing on a terminal's line."""
        if self.stream.isatty():
            self.stream.write(_CLEAR)
            self.stream.flush()


def size(length: float) -> str:
    """`1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if length < 1024:
            return f"{length:.0f} {unit}" if unit == "B" else f"{length:.1f} {unit}"
        length /= 1024
    return f"{length:.1f} TiB"


def duration(seconds: float) -> str:
    """`2 h 5 min`, `3 min 20 s`, `7 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} days"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
