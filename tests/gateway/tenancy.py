"""Accounts for the store tests."""

from adp_gateway.store.base import AccountStats, ObjectStore
from adp_gateway.store.quotas import Account

QUOTA = 1 << 20
MINE = b"of mine:" + bytes(24)
THEIRS = b"of them:" + bytes(24)
TIGHT = b"of tight" + bytes(24)
FREE = b"of free:" + bytes(24)
ACCOUNTS = (
    Account(name="mine", prefix=MINE[:8], quota_bytes=QUOTA),
    Account(name="theirs", prefix=THEIRS[:8], quota_bytes=QUOTA),
    Account(name="free", prefix=FREE[:8]),
    Account(name="tight", prefix=TIGHT[:8], quota_bytes=64 << 10),
)


def account(store: ObjectStore, name: str) -> AccountStats:
    (found,) = (account for account in store.stats().accounts if account.name == name)
    return found
