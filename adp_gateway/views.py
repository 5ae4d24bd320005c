"""The store as one connection sees it: its tenant's namespaces, and no others.

Every verb of a session goes through here, so none can forget whose namespaces it is asked for.
"""

from collections.abc import Sequence

from .store.base import Hold, ObjectStore, PutItem, ReadLease, StoreStats
from .tenants import Tenant


class StoreView:
    """`ObjectStore` for the tenant that has entered. Nobody has to begin with: then no verb works."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._tenant: Tenant | None = None

    def enter(self, tenant: Tenant) -> None:
        """From here on the view is this tenant's."""
        self._tenant = tenant

    def _stored(self, namespace: bytes) -> bytes:
        assert self._tenant is not None, "a request before HELLO, which the core should have refused"
        return self._tenant.stored(namespace)

    @property
    def max_object_bytes(self) -> int:
        """The largest object that a put will take."""
        return self._store.max_object_bytes

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key."""
        return self._store.exist(self._stored(namespace), keys)

    def hold(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[bytes, Hold]:
        """As `exist`, and hold what is there."""
        return self._store.hold(self._stored(namespace), keys)

    def open_read(self, namespace: bytes, keys: Sequence[bytes]) -> list[ReadLease | None]:
        """Pin each object that is there."""
        return self._store.open_read(self._stored(namespace), keys)

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        """Read and hash each object: a lease belongs to whom it was given."""
        return await self._store.verify(leases)

    async def read_into(
        self, leases: Sequence[ReadLease], buffers: Sequence[memoryview], *, is_verified: bool = True
    ) -> bytes:
        """Read each object into the start of its buffer."""
        return await self._store.read_into(leases, buffers, is_verified=is_verified)

    async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
        """Store each item."""
        return await self._store.put_many(self._stored(namespace), items)

    async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Delete each key."""
        return await self._store.delete_many(self._stored(namespace), keys)

    async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Verify by key."""
        return await self._store.check_many(self._stored(namespace), keys)

    async def flush(self) -> None:
        """Return when everything acknowledged so far is on the device."""
        await self._store.flush()

    @property
    def trouble(self) -> str | None:
        """As the store has it."""
        return self._store.trouble

    def stats(self) -> StoreStats:
        """Of the whole store: for the gateway, not for clients."""
        return self._store.stats()
