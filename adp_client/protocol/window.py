"""Credits: how many requests, and how many bytes of objects, may be in flight (spec section 7.4).

The same arithmetic on both sides: the client asks `fits` before it sends, the gateway's core enforces it.
"""

from .constants import ErrorCode
from .errors import LocalProtocolError


class Window:
    """Requests and bytes in flight against their limits. Never negative, never above."""

    def __init__(self, max_requests: int, max_inflight_bytes: int) -> None:
        self._max_requests = max_requests
        self._max_bytes = max_inflight_bytes
        self.requests = 0
        self.inflight_bytes = 0

    def resize(self, max_requests: int, max_inflight_bytes: int) -> None:
        """A new window (CREDIT). What is already in flight stays; nothing new fits until it is inside."""
        self._max_requests = max_requests
        self._max_bytes = max_inflight_bytes

    def fits(self, cost_bytes: int) -> bool:
        """Whether one more request of `cost_bytes` may start now."""
        return self.requests < self._max_requests and self.inflight_bytes + cost_bytes <= self._max_bytes

    def open(self) -> None:
        """One more request. Raises LocalProtocolError above the limit."""
        if self.requests >= self._max_requests:
            raise LocalProtocolError(
                f"more than {self._max_requests} requests in flight", ErrorCode.LIMIT_EXCEEDED
            )
        self.requests += 1

    def take(self, cost_bytes: int) -> None:
        """More bytes for a request that is open. Raises LocalProtocolError above the limit."""
        if self.inflight_bytes + cost_bytes > self._max_bytes:
            raise LocalProtocolError(f"more than {self._max_bytes} bytes in flight", ErrorCode.LIMIT_EXCEEDED)
        self.inflight_bytes += cost_bytes

    def close(self, cost_bytes: int) -> None:
        """A request has its final reply; `cost_bytes` is all it took."""
        self.requests -= 1
        self.inflight_bytes -= cost_bytes
