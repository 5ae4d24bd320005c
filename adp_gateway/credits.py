"""One budget for everything that clients have in flight, and each connection's share of it. Pure.

WELCOME tells a connection the most that it may ever have in flight. With a thousand connections that is far
more than a gateway wants to see at once, so those that have agreed on CREDITS are told a share: the budget
divided by their number, rounded up to a power of two. Rounding is what keeps this quiet: while the number
doubles, each connection is told once, and it may use more only when the number has fallen to a quarter.
"""

from collections.abc import Callable
from typing import TypeAlias

from adp_client.protocol.messages import Credit, Limits

Tell: TypeAlias = Callable[[Credit], None]


class Credits:
    """`inflight_bytes` and `requests` for all connections together, within `limits` for each."""

    def __init__(self, *, inflight_bytes: int, requests: int, limits: Limits) -> None:
        self._inflight_bytes = inflight_bytes
        self._requests = requests
        self._limits = limits
        self._parts = 1
        self._members: dict[Tell, Credit] = {}

    @property
    def connections(self) -> int:
        """How many share the budget."""
        return len(self._members)

    @property
    def share(self) -> Credit:
        """What a connection may use of its window now."""
        return Credit(
            requests=max(1, min(self._limits.max_requests, self._requests // self._parts)),
            inflight_bytes=min(self._limits.max_inflight_bytes, self._inflight_bytes // self._parts),
        )

    def join(self, tell: Tell) -> None:
        """One more connection. `tell` is called whenever its share changes, perhaps at once.

        A connection starts with all that WELCOME allows, and `tell` neither waits nor joins or leaves.
        """
        whole = Credit(requests=self._limits.max_requests, inflight_bytes=self._limits.max_inflight_bytes)
        self._members[tell] = whole
        while self._parts < len(self._members):
            self._parts *= 2
        self._tell()

    def leave(self, tell: Tell) -> None:
        """A connection has ended. Harmless if it never joined."""
        if self._members.pop(tell, None) is None:
            return
        while self._parts > 1 and len(self._members) <= self._parts // 4:
            self._parts //= 2
        self._tell()

    def _tell(self) -> None:
        share = self.share
        for tell, told in self._members.items():
            if told != share:
                self._members[tell] = share
                tell(share)
