"""What the verbs return. A miss is a value: look at `statuses`, one ErrorCode byte for each key, in order."""

import attrs

from .leases import Lease
from .protocol.constants import ErrorCode, Feature
from .protocol.messages import Limits


@attrs.frozen(kw_only=True)
class BatchResult:
    """The outcome of each item of a call."""

    statuses: bytes

    @property
    def leading_ok(self) -> int:
        """How many items from the first on are OK without a gap: the usable prefix."""
        return len(self.statuses) - len(self.statuses.lstrip(b"\0"))

    @property
    def count_ok(self) -> int:
        """How many items are OK."""
        return self.statuses.count(ErrorCode.OK)

    @property
    def is_all_ok(self) -> bool:
        """Whether every item is OK."""
        return self.count_ok == len(self.statuses)


@attrs.frozen(kw_only=True)
class ExistResult(BatchResult):
    """OK: it is there. NOT_FOUND: it is not.

    With a lease, what is OK stays there while the lease is live, and NOT_FOUND is also what somebody is about
    to delete. None if none was asked for, or nothing was found, or the gateway did not grant it: then what is
    OK may be gone by the time that you read it.
    """

    lease: Lease | None = attrs.field(default=None, eq=False)


@attrs.frozen(kw_only=True)
class ReadResult(BatchResult):
    """`lengths[i]` bytes of buffer i are the object, if its status is OK; other buffers hold no object."""

    lengths: tuple[int, ...]


@attrs.frozen(kw_only=True)
class WriteResult(BatchResult):
    """OK: stored, and visible to every READ from now on. GATEWAY_FAULT: it failed, or its worker is gone."""


@attrs.frozen(kw_only=True)
class DeleteResult(BatchResult):
    """OK: gone. NOT_FOUND: it was not there."""


@attrs.frozen(kw_only=True)
class CheckResult(BatchResult):
    """OK: whole. CORRUPT: it was damaged, and has been dropped."""


@attrs.frozen(kw_only=True)
class GatewayInfo:
    """The gateway at the other end, as it introduced itself. Another `boot_id`: it has been restarted.

    `features` are those that both sides have. Without FRAGMENTS, the client cuts what is too large for
    `limits.max_command_bytes`.

    `workers`: of how many processes it consists. If there are several, each is a gateway for its part of the
    objects, with a boot id of its own, and this is how the first of them introduced itself.
    """

    boot_id: bytes
    agent: str
    features: Feature
    limits: Limits
    epoch: int
    workers: int = 1
