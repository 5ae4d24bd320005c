"""The leases of a gateway in memory: who holds what, until when, and which deletes wait for it."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import anyio
import attrs

Subject: TypeAlias = tuple[bytes, bytes]  # (namespace, key)


@attrs.frozen(kw_only=True)
class GrantedLease:
    """One lease. `owner` is the session whose end is its end too."""

    owner: object
    subjects: frozenset[Subject]
    expires_at: float


@attrs.define(eq=False, kw_only=True)
class Claim:
    """A delete: objects that wait for their leases to end. Nobody gets a new lease on them meanwhile."""

    left: set[Subject]
    take: Callable[[Subject], None]


class LeaseBook:
    """All leases of a gateway. Time is anyio's; what has expired is struck out whenever somebody looks."""

    def __init__(self) -> None:
        self._leases: dict[int, GrantedLease] = {}
        self._last_id = 0
        self._claims: list[Claim] = []
        self._changed = anyio.Event()

    def __len__(self) -> int:
        self._strike_out()
        return len(self._leases)

    def grant(self, owner: object, subjects: Iterable[Subject], seconds: float) -> int:
        """A new lease from now on; its id."""
        self._last_id += 1
        self._leases[self._last_id] = GrantedLease(
            owner=owner, subjects=frozenset(subjects), expires_at=anyio.current_time() + seconds
        )
        return self._last_id

    def release(self, owner: object, lease_id: int) -> bool:
        """End a lease; whether `owner` had it."""
        self._strike_out()
        lease = self._leases.get(lease_id)
        if lease is None or lease.owner is not owner:
            return False
        del self._leases[lease_id]
        self._tell()
        return True

    def leave(self, owner: object) -> None:
        """End every lease of `owner`."""
        self._leases = {each: lease for each, lease in self._leases.items() if lease.owner is not owner}
        self._tell()

    def is_held(self, subject: Subject) -> bool:
        """Whether a lease stands on this object."""
        self._strike_out()
        return any(subject in lease.subjects for lease in self._leases.values())

    def is_claimed(self, subject: Subject) -> bool:
        """Whether a delete waits for the leases on this object, so that there may be no new ones."""
        return any(subject in claim.left for claim in self._claims)

    def claim(self, subjects: Sequence[Subject], take: Callable[[Subject], None]) -> Claim:
        """Call `take` for each object on which no lease stands, now; for the others in `wait`."""
        claim = Claim(left=set(subjects), take=take)
        self._claims.append(claim)
        self._serve(claim)
        return claim

    async def wait(self, claim: Claim) -> None:
        """Return when the last object has been taken. However it ends, the claim has ended."""
        try:
            while True:
                self._serve(claim)
                if not claim.left:
                    return
                with anyio.CancelScope(deadline=min(each.expires_at for each in self._leases.values())):
                    await self._changed.wait()
        finally:
            self._claims.remove(claim)

    def _serve(self, claim: Claim) -> None:
        for subject in [subject for subject in claim.left if not self.is_held(subject)]:
            claim.take(subject)
            claim.left.discard(subject)

    def _strike_out(self) -> None:
        now = anyio.current_time()
        over = [each for each, lease in self._leases.items() if lease.expires_at <= now]
        for lease_id in over:
            del self._leases[lease_id]
        if over:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
