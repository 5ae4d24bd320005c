"""What the device has refused: counted, told at most every ten seconds for each matter, kept for who asks.

A device that fails does so with every command, thousands of times a second. The first failure is a line in
the log, the others are a number in the next; the counters have them all.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

import attrs

from adp_gateway.errors import DeviceFull
from adp_gateway.logs import Complaints

#: What was being done; the values of a label, so there are no others.
OPERATIONS = ("read", "write", "delete", "sync", "create_segment", "remove_segment", "trim_segment")
MEMORY_SECONDS = (
    30.0  # so long a failure is held against the device, if nothing is done that would disprove it
)


@attrs.define(eq=False)
class Troubles:
    """The troubles of one store."""

    _logger: logging.Logger
    _clock: Callable[[], float] = time.monotonic
    errors: Counter[str] = attrs.field(factory=lambda: Counter(dict.fromkeys(OPERATIONS, 0)), init=False)
    _complaints: Complaints = attrs.field(factory=Complaints, init=False)
    _failing: dict[str, tuple[str, float]] = attrs.field(factory=dict, init=False)

    def failed(self, operation: str, matter: str, reason: object = "", *, count: int = 1) -> None:
        """`count` commands failed. `matter` is one of a few texts; `reason` may be any, or the error itself.

        A device that is full works as it should, and is not failing.
        """
        self.errors[operation] += count
        if not isinstance(reason, DeviceFull):
            self._failing[operation] = (f"{matter}: {reason}" if str(reason) else matter, self._clock())
        self.tell(matter, reason)

    def worked(self, operation: str) -> None:
        """A command of this kind has succeeded: so the device does that again."""
        if self._failing:
            self._failing.pop(operation, None)

    @property
    def failing(self) -> str | None:
        """What the device has failed at lately and not done since; None if nothing."""
        oldest = self._clock() - MEMORY_SECONDS
        return next((text for text, when in self._failing.values() if when >= oldest), None)

    def tell(self, matter: str, reason: object = "") -> None:
        """A line in the log, unless it would be one too many."""
        self._complaints.tell(self._logger, logging.WARNING, "store", matter, str(reason), now=self._clock())
