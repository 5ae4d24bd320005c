"""What the gateway can be told. Frozen, validated when made; defaults need nothing but a directory."""

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import ge, gt, in_, min_len

from adp_client.transport.endpoints import Endpoint, TLSEndpoint
from adp_gateway.store.format import UNIT_BYTES
from adp_gateway.store.quotas import Account
from adp_gateway.tenants import Tenant

MIB = 1 << 20
SMALLEST_SEGMENT_BYTES = 64 << 10
SMALLEST_CAPACITY_BYTES = 4 * SMALLEST_SEGMENT_BYTES
SEGMENTS_PER_STORE = 4  # fewer, and evicting one segment would throw away most of the cache


def _whole_number(
    least: int, most: int, *, unit: int = 1
) -> Callable[[object, "attrs.Attribute[Any]", int | None], None]:
    """A validator: a whole number in [least, most], a multiple of `unit`. None passes where it is default."""

    def validate(_instance: object, attribute: "attrs.Attribute[Any]", value: int | None) -> None:
        if value is None and attribute.default is None:
            return
        if type(value) is not int:
            raise TypeError(f"'{attribute.name}' must be a whole number: {value!r}")
        if not least <= value <= most:
            raise ValueError(f"'{attribute.name}' must be between {least} and {most}: {value}")
        if value % unit:
            raise ValueError(f"'{attribute.name}' must be a multiple of {unit}: {value}")

    return validate


@attrs.frozen(kw_only=True)
class StoreConfig:
    """One store in one directory.

    directory: where it lives; made if absent.
    capacity_bytes: hard limit for everything in the directory. None: 80% of what is free there plus what the
        store already takes.
    segment_bytes: how much is written, and evicted, as a unit; an object must fit into one. None: chosen from
        the capacity.
    max_command_bytes: the longest read or write the device is asked for; larger objects go in several.
    max_object_bytes: larger puts are refused.
    io_threads: I/O threads for reads, and as many again for writes, so that a stuck write holds up no read.
    io_seconds: how long a read may wait for a thread, and then for the device, before it is given up.
    accounts: whose namespaces are counted, and up to which quota.
    io: "direct": objects go around the page cache, except where a socket sends them from it; "buffered":
        through it; "auto": the first where the file system takes it.
    durability: "relaxed": what was acknowledged survives the death of the process; a power cut may lose it,
        undo a delete, or bring an older version back. "durable": it survives a power cut too, at the price of
        two device syncs for a batch of puts and one for each journal that a delete touches.
    """

    directory: Path = attrs.field(converter=Path)
    capacity_bytes: int | None = attrs.field(
        default=None, validator=_whole_number(SMALLEST_CAPACITY_BYTES, 1 << 60)
    )
    segment_bytes: int | None = attrs.field(
        default=None, validator=_whole_number(SMALLEST_SEGMENT_BYTES, 1 << 40, unit=UNIT_BYTES)
    )
    max_command_bytes: int = attrs.field(
        default=262144, validator=_whole_number(UNIT_BYTES, 64 * MIB, unit=UNIT_BYTES)
    )
    max_object_bytes: int = attrs.field(default=64 * MIB, validator=_whole_number(1, (1 << 32) - 1))
    io_threads: int = attrs.field(default=8, validator=_whole_number(1, 256))
    io_seconds: float = attrs.field(default=10.0, validator=gt(0))
    io: Literal["auto", "direct", "buffered"] = attrs.field(
        default="auto", validator=in_(("auto", "direct", "buffered"))
    )
    durability: Literal["relaxed", "durable"] = attrs.field(
        default="relaxed", validator=in_(("relaxed", "durable"))
    )
    accounts: tuple[Account, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.capacity_bytes is not None and self.segment_bytes is not None:
            least = SEGMENTS_PER_STORE * self.segment_bytes
            if self.capacity_bytes < least:
                raise ValueError(f"'capacity_bytes' must be at least {least}, {SEGMENTS_PER_STORE} segments")


def default_capacity_bytes(*, free_bytes: int, used_bytes: int) -> int:
    """The capacity when none was given: 80% of the room that is there for the taking, in whole units."""
    share = (free_bytes + used_bytes) * 4 // 5
    return max(SMALLEST_CAPACITY_BYTES, share - share % UNIT_BYTES)


def default_segment_bytes(capacity_bytes: int) -> int:
    """The segment size when none was given.

    A 64th of the capacity, so that an eviction is a small step; at least 128 MiB, which the largest object
    fits into; at most 2 GiB; and at most what leaves `SEGMENTS_PER_STORE`.
    """
    size = min(max(capacity_bytes // 64, 128 * MIB), 2048 * MIB, capacity_bytes // SEGMENTS_PER_STORE)
    return size - size % UNIT_BYTES


@attrs.frozen(kw_only=True)
class GatewayConfig:
    """One gateway process.

    listen: where clients reach it; at least one endpoint.
    admin: where /healthz and /metrics are; None: nowhere.
    tls: certificate, key, and whom to trust, of endpoints tls://; `adp_client.transport.trust` loads it.
    token: what every client must show; None: nothing. It is compared in constant time, and never logged.
    tenants: who may connect, each with a token and a part of the store of its own, instead of one token for
        all. `store.accounts` has to have their accounts.
    grace_seconds: how long a drain waits for clients before their connections are cut.
    max_sessions: connections at a time; more are turned away with a reason.
    incoming_bytes: memory for objects on their way in, for all connections together.
    inflight_bytes: objects that all connections together may have in flight, in both directions; each is told
        its share.
    request_bytes: memory for everything else that requests hold while they are worked on; leases get a
        quarter of it on top.
    queued_bytes: objects in frames that wait to be sent, for each connection; meanwhile they stay in files.
    transfer_threads: threads that copy between files, memory and sockets.
    """

    store: StoreConfig
    listen: tuple[Endpoint, ...] = attrs.field(validator=min_len(1))
    admin: Endpoint | None = None
    tls: ssl.SSLContext | None = attrs.field(default=None, repr=False, eq=False)
    token: bytes | None = attrs.field(default=None, repr=False)
    tenants: tuple[Tenant, ...] = ()
    grace_seconds: float = attrs.field(default=10.0, validator=ge(0))
    max_sessions: int = attrs.field(default=1024, validator=_whole_number(1, 1 << 20))
    incoming_bytes: int = attrs.field(default=512 * MIB, validator=_whole_number(1, 1 << 40))
    inflight_bytes: int = attrs.field(default=4096 * MIB, validator=_whole_number(1, 1 << 50))
    request_bytes: int = attrs.field(default=256 * MIB, validator=_whole_number(1, 1 << 40))
    queued_bytes: int = attrs.field(default=32 * MIB, validator=_whole_number(1, 1 << 40))
    transfer_threads: int = attrs.field(default=16, validator=_whole_number(1, 1024))

    def __attrs_post_init__(self) -> None:
        if (self.tls is not None) != any(isinstance(endpoint, TLSEndpoint) for endpoint in self.listen):
            raise ValueError("'listen' tls://HOST:PORT, and 'tls', a certificate and its key, go together")
        if self.tenants and self.token is not None:
            raise ValueError("'token' is for everybody, 'tenants' have their own: one of the two")
        if self.store.accounts != tuple(tenant.account for tenant in self.tenants):
            raise ValueError("'store.accounts' must be the accounts of 'tenants'")
