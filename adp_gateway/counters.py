"""What a gateway has counted since it started. Plain numbers; whoever exports them gives them names."""

from collections import Counter

import attrs

from .meter import Verb, new_verbs


@attrs.define
class Counters:
    """All sessions together."""

    sessions: int = 0  # open now
    sessions_opened: int = 0
    sessions_turned_away: int = 0  # no room, or draining
    handshakes_failed: int = 0  # of TLS; no session came of them
    violations: Counter[str] = attrs.field(factory=Counter)  # what ended connections, by ErrorCode name
    verbs: dict[type, Verb] = attrs.field(factory=new_verbs)
    faults: int = 0  # requests that failed for the gateway's own reasons
    received_bytes: int = 0  # payload
    sent_bytes: int = 0  # payload, counted when it is queued
    leases_granted: int = 0
    leases_released: int = 0  # by RELEASE
    leases_expired: int = 0  # the others ended with their connection
    leased_items: int = 0  # under a lease now; an object counts once for each
