"""How much may be under way in the whole process, and the answer when it is too much. Pure.

A connection's own window (the core enforces it) bounds what one client can have in flight; a thousand clients
may each fill theirs. What a request keeps in memory while it is worked on, its keys, leases and status bytes,
is therefore charged against one budget. A request that does not fit is answered OVERLOADED at once: it holds
nothing, and its connection goes on. Payload memory is another matter (`buffers`): there a client waits.
"""

import attrs

from adp_client.protocol.messages import Request

ITEM_OVERHEAD_BYTES = 512  # key object, lease, extents, frame item: measured at about 400


def request_bytes(items: int, key_bytes: int) -> int:
    """What a request of `items` keys keeps in memory until it is answered."""
    return items * (ITEM_OVERHEAD_BYTES + key_bytes)


def message_bytes(message: Request) -> int:
    """`request_bytes` of a message; 0 for one without keys."""
    keys = getattr(message, "keys", ())
    return request_bytes(len(keys), len(keys[0])) if keys else 0


@attrs.define
class Admission:
    """One budget in bytes. Only a request that came when nothing was under way can exceed it."""

    budget_bytes: int
    retry_after_ms: int = 100
    used_bytes: int = attrs.field(default=0, init=False)
    refused: int = attrs.field(default=0, init=False)

    def admit(self, cost_bytes: int) -> bool:
        """Whether a request of `cost_bytes` may start now; if so it counts until `leave`.

        An empty house takes anybody, so that no request is too large for ever.
        """
        if self.used_bytes and self.used_bytes + cost_bytes > self.budget_bytes:
            self.refused += 1
            return False
        self.used_bytes += cost_bytes
        return True

    def leave(self, cost_bytes: int) -> None:
        """A request that was admitted with `cost_bytes` is over."""
        assert cost_bytes <= self.used_bytes, "a request left twice"
        self.used_bytes -= cost_bytes
