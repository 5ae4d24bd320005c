"""What I/O threads do to whole segments: make them, sync them, append kills, remove them. It all blocks."""

from adp_gateway.device.base import Device
from adp_gateway.errors import StorageError

from .format import Header, Record, data_name, encode_header, journal_name
from .journal import Journal
from .segment import Layout, Segment


def append_kills(work: list[tuple[Segment, list[Record]]], is_durable: bool) -> list[StorageError | None]:
    """Append each segment's kills to its journal; for each, what kept it from that.

    None is written behind the first that did not take: they may void later versions of the same keys, and
    those must go last.
    """
    done: list[StorageError | None] = []
    for segment, kills in work:
        try:
            segment.journal.append(kills)
            if is_durable:
                segment.journal.sync()
        except StorageError as error:
            return done + [error] * (len(work) - len(done))
        done.append(None)
    return done


def sync_all(device: Device, segments: list[Segment]) -> tuple[list[bool], StorageError | None]:
    """Sync the names and every segment; which are synced, and what first went wrong."""
    synced: list[bool] = []
    first_error: StorageError | None = None
    try:
        device.sync_names()
    except StorageError as error:
        first_error = error
    for segment in segments:
        try:
            segment.data.sync()
            segment.journal.sync()
        except StorageError as error:
            first_error = first_error or error
            synced.append(False)
        else:
            synced.append(first_error is None)
    return synced, first_error


def create_files(device: Device, segment_id: int, layout: Layout, is_durable: bool) -> Segment:
    """Make an empty segment, with all its room reserved.

    Raises:
        StorageError: the device refused. What has been made, with its room, is left for `remove_names`.
    """
    opened = []
    try:
        data = device.create(data_name(segment_id), has_extents=True)
        opened.append(data)
        data.allocate(layout.data_bytes)
        journal = device.create(journal_name(segment_id))
        opened.append(journal)
        journal.write(memoryview(encode_header(Header(segment_id, layout.segment_bytes))), 0)
        if is_durable:
            data.sync()
            journal.sync()
            device.sync_names()
    except StorageError:
        for file in opened:
            file.close()
        raise
    return Segment(
        segment_id=segment_id,
        layout=layout,
        data=data,
        journal=Journal(journal, segment_id=segment_id, slots=1, max_command_bytes=device.max_command_bytes),
    )


def remove_files(device: Device, segment: Segment, is_durable: bool) -> None:
    """Close and remove both files. May be called again after it failed.

    Raises:
        StorageError: the device refused.
    """
    segment.data.close()
    segment.journal.close()
    remove_names(device, segment.segment_id, is_durable)


def remove_names(device: Device, segment_id: int, is_durable: bool) -> None:
    """Remove both files, as far as they are there. May be called again after it failed.

    Raises:
        StorageError: the device refused.
    """
    device.remove(journal_name(segment_id))  # first: a data file without a journal is nothing
    device.remove(data_name(segment_id))
    if is_durable:
        device.sync_names()
