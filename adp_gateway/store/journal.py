"""Appending to a segment's journal: what makes a write count.

Appends come from several I/O threads. One lock orders them, because a gap would be a tear: a record behind
bytes that a crash never wrote. Syncing happens outside the lock; it covers what was appended before it began.
"""

import threading

from adp_gateway.device.base import DeviceFile
from adp_gateway.errors import StorageError

from .format import RECORD_BYTES, Record, encode_records


class Journal:
    """The journal of one segment, open for appending behind slot `slots - 1`."""

    def __init__(self, file: DeviceFile, *, segment_id: int, slots: int, max_command_bytes: int) -> None:
        self._file = file
        self._segment_id = segment_id
        self._slots = slots
        self._records_per_command = max_command_bytes // RECORD_BYTES
        self._guard = threading.Lock()
        self._is_torn = False

    @property
    def length_bytes(self) -> int:
        """Where the next record goes."""
        return self._slots * RECORD_BYTES

    def append(self, records: list[Record]) -> None:
        """Write `records` behind all others, each command's worth at once. Blocks.

        Raises:
            StorageError: none of `records` counts. What the failed command left behind has been cut off, or
                will be before anything else is written here.
        """
        with self._guard:
            self._cut_tear()
            raw = encode_records(records, segment_id=self._segment_id, slot=self._slots)
            view = memoryview(raw)
            step = self._records_per_command * RECORD_BYTES
            try:
                for start in range(0, len(raw), step):
                    self._file.write(view[start : start + step], self.length_bytes + start)
            except StorageError:
                # Not by overwriting: a shorter append would leave whole records of this one behind it.
                self._is_torn = True
                self._cut_tear(is_best_effort=True)
                raise
            self._slots += len(records)

    def _cut_tear(self, *, is_best_effort: bool = False) -> None:
        if not self._is_torn:
            return
        try:
            self._file.truncate(self.length_bytes)
        except StorageError:
            if not is_best_effort:
                raise
        else:
            self._is_torn = False

    def sync(self) -> None:
        """Return when everything appended before is on the device. Blocks.

        Raises:
            StorageError: it may not be.
        """
        self._file.sync()

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
