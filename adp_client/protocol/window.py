"""Credits: how many requests, and how many bytes of objects, may be in flight (spec section 7.4).

Two pairs of limits. What WELCOME said is hard: the gateway's core ends a connection that goes beyond it. What
the last CREDIT said, never more than that, binds the client alone, as requests and CREDIT may have crossed;
and with nothing in flight one request may always go, so that no credit is too small for ever.
"""

from .constants import ErrorCode
from .errors import LocalProtocolError


class Window:
    """Requests and bytes in flight against their limits. Never negative, never above."""

    def __init__(self, max_requests: int, max_inflight_bytes: int) -> None:
        self.requests = 0
        self.inflight_bytes = 0
        self.resize(max_requests, max_inflight_bytes)

    def resize(self, max_requests: int, max_inflight_bytes: int) -> None:
        """The hard limits (WELCOME), and a credit as large."""
        self._max_requests = max_requests
        self._max_bytes = max_inflight_bytes
        self._credit_requests = max_requests
        self._credit_bytes = max_inflight_bytes

    def credit(self, requests: int, inflight_bytes: int) -> None:
        """What may be used of it from now on (CREDIT). What is in flight already stays.

        Raises LocalProtocolError for more than the hard limits, and for no request at all.
        """
        if not 1 <= requests <= self._max_requests or inflight_bytes > self._max_bytes:
            raise LocalProtocolError(
                f"a credit of {requests} requests, {inflight_bytes} bytes in a window of "
                f"{self._max_requests}, {self._max_bytes}"
            )
        self._credit_requests = requests
        self._credit_bytes = inflight_bytes

    def fits(self, cost_bytes: int) -> bool:
        """Whether one more request of `cost_bytes` may start now."""
        if not self.requests:
            return self._max_requests > 0 and cost_bytes <= self._max_bytes
        return (
            self.requests < self._credit_requests and self.inflight_bytes + cost_bytes <= self._credit_bytes
        )

    def open(self, cost_bytes: int) -> None:
        """One more request, whose first frame costs so much. Raises LocalProtocolError if it does not fit."""
        if not self.fits(cost_bytes):
            raise LocalProtocolError(
                f"{self.requests + 1} requests with {self.inflight_bytes + cost_bytes} bytes in flight, more "
                f"than {self._credit_requests} or {self._credit_bytes}",
                ErrorCode.LIMIT_EXCEEDED,
            )
        self.requests += 1
        self.inflight_bytes += cost_bytes

    def take(self, cost_bytes: int) -> None:
        """More bytes for a request that is open: only a hard limit keeps it from being finished."""
        if self.inflight_bytes + cost_bytes > self._max_bytes:
            raise LocalProtocolError(f"more than {self._max_bytes} bytes in flight", ErrorCode.LIMIT_EXCEEDED)
        self.inflight_bytes += cost_bytes

    def close(self, cost_bytes: int) -> None:
        """A request has its final reply; `cost_bytes` is all it took."""
        self.requests -= 1
        self.inflight_bytes -= cost_bytes
