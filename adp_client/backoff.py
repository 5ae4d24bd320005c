"""When to dial again. Pure: the source of randomness is an argument."""

import random

from .config import BackoffConfig


class Backoff:
    """Delays of one endpoint. `reset` only after a successful exchange, not after a bare connect: a gateway
    that accepts and dies would otherwise be dialled in a tight loop."""

    def __init__(self, config: BackoffConfig, source: random.Random) -> None:
        self._config = config
        self._source = source
        self._delay_seconds = config.initial_seconds

    def next_delay_seconds(self) -> float:
        """How long to wait before the next attempt."""
        config, capped = self._config, min(self._delay_seconds, self._config.cap_seconds)
        self._delay_seconds = min(self._delay_seconds * config.factor, config.cap_seconds)
        return capped * (1.0 - config.jitter * self._source.random())

    def reset(self) -> None:
        """Begin again with the shortest delay."""
        self._delay_seconds = self._config.initial_seconds
