"""What all sessions of a gateway have in common."""

import attrs

from adp_client.protocol.messages import Limits

from .admission import Admission
from .buffers import Arena
from .counters import Counters
from .credits import Credits
from .logs import Complaints
from .regions import RegionBudget
from .store.base import ObjectStore
from .tenants import Door


@attrs.frozen(kw_only=True)
class Patience:
    """How long a session waits for whom."""

    hello_seconds: float = 10.0  # from the connection to the whole HELLO
    frame_seconds: float = 30.0  # from one sign of progress in a frame, or unfinished WRITE, to the next
    memory_seconds: float = 0.5  # for memory; its connection is not read meanwhile
    stall_seconds: float = 5.0  # for a peer that holds memory others wait for, and sends less than
    trickle_bytes_per_second: float = 65536.0  # ... this
    send_seconds: float = 25.0  # for one frame to be taken by the peer; a DELETE may wait for that
    verify_seconds: float = 10.0  # for looking for the objects that the device fails to deliver
    farewell_seconds: float = 1.0  # for the last frame to leave, and the peer to hang up


@attrs.frozen(kw_only=True)
class Shared:
    """What all sessions of a gateway have in common."""

    store: ObjectStore
    arena: Arena
    admission: Admission
    credits: Credits
    limits: Limits
    boot_id: bytes
    agent: str
    door: Door = attrs.field(factory=Door)
    patience: Patience = attrs.field(factory=Patience)
    max_queued_bytes: int = 8 << 20
    counters: Counters = attrs.field(factory=Counters)
    lease_admission: Admission = attrs.field(
        factory=lambda: Admission(64 << 20)
    )  # what leases keep in memory
    complaints: Complaints = attrs.field(factory=Complaints)
    region_budget: RegionBudget = attrs.field(factory=RegionBudget)
