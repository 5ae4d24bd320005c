"""Whether a gateway should get requests, for load balancers, supervisors and people."""

import enum
from collections.abc import Callable

import attrs


class Condition(enum.Enum):
    """What a gateway is doing."""

    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"
    DRAINING = "draining"


@attrs.define
class Health:
    """`stage` is set by whoever runs the gateway; `trouble` is asked for, and tells why the store fails."""

    stage: Condition = Condition.STARTING
    trouble: Callable[[], str | None] = attrs.field(default=lambda: None)

    @property
    def condition(self) -> tuple[Condition, str]:
        """What it is doing, and why it should get no requests if so."""
        if self.stage is Condition.STARTING:
            return self.stage, "the store is being opened"
        if self.stage is Condition.DRAINING:
            return self.stage, "the gateway is going away"
        trouble = self.trouble()
        if trouble is not None:
            return Condition.FAILING, trouble
        return Condition.READY, ""

    @property
    def is_ready(self) -> bool:
        """Whether it should get requests."""
        return self.condition[0] is Condition.READY
