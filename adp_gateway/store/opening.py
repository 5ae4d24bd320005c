"""From a configuration to a store that can begin to work: lock, recover, keep to the limits of today."""

import logging
import secrets

import attrs

from adp_gateway.config import (
    SEGMENTS_PER_STORE,
    StoreConfig,
    default_capacity_bytes,
    default_segment_bytes,
)
from adp_gateway.device.base import Device
from adp_gateway.device.file import FileDevice
from adp_gateway.errors import StorageError

from .catalog import Catalog
from .eviction import Ghosts, TwoQueues, ghost_slots
from .files import append_kills, remove_files
from .format import UNIT_BYTES
from .reclaim import choose_victim
from .recovery import RecoveryReport, check_place, recover, resume
from .segment import Layout

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class Opened:
    """What opening made, in a thread, before there is a store."""

    device: Device
    catalog: Catalog
    recovery: RecoveryReport
    capacity_bytes: int
    layout: Layout
    is_shrunk: bool  # an account has lost objects to a quota that was lowered


def open_device(config: StoreConfig, device: Device | None) -> Opened:
    """Lock, recover, and keep to the capacity and the quotas that are configured now. Blocks."""
    if device is None:
        device = FileDevice(config.directory, max_command_bytes=config.max_command_bytes, io=config.io)
    check_place(device)
    device.lock()
    try:
        catalog, report = recover(device, config.accounts)
        capacity_bytes = config.capacity_bytes or default_capacity_bytes(
            free_bytes=device.free_bytes(), used_bytes=catalog.used_bytes
        )
        most = capacity_bytes // SEGMENTS_PER_STORE // UNIT_BYTES * UNIT_BYTES
        layout = Layout(min(config.segment_bytes or default_segment_bytes(capacity_bytes), most))
        resume(catalog, segment_bytes=layout.segment_bytes)
        catalog.policy = TwoQueues(Ghosts(ghost_slots(capacity_bytes), seed=secrets.randbits(64)))
        while catalog.used_bytes > capacity_bytes and (victim := choose_victim(catalog)):
            kills = [(catalog.segments[segment_id], kills) for segment_id, kills in catalog.unkilled.items()]
            # It may hold the newest commit of a key whose older ones are not killed yet.
            if any(append_kills(kills, True)):
                break
            catalog.unkilled = {}
            catalog.doom(victim)
            try:
                remove_files(device, victim, is_durable=True)
            except StorageError as error:
                # It counts on, so puts will be refused until it can be removed; reads need not wait for that.
                logger.warning("segment %d cannot be removed: %s", victim.segment_id, error)
                break
            catalog.overdue.clear()
        is_shrunk = sum(book.shrink() for book in catalog.books) > 0
    except BaseException:
        device.close()
        raise
    return Opened(
        device=device,
        catalog=catalog,
        recovery=report,
        capacity_bytes=capacity_bytes,
        layout=layout,
        is_shrunk=is_shrunk,
    )
