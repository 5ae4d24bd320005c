"""What can go wrong below the protocol. `session.py` maps each to one `ErrorCode`.

The store answers per item with a status byte, so these are raised only where there is no item to answer for:
opening a store, flushing it, and inside the device layer.
"""

from adp_client.protocol.errors import ADPError


class StorageError(ADPError):
    """Root of the storage half's errors."""


class CorruptRecord(StorageError):
    """A superblock, segment header or journal record does not decode. The bytes were not used."""


class DeviceFull(StorageError):
    """No room on the device (ENOSPC, EDQUOT, EFBIG). Nothing of the command counts as written."""


class DeviceFault(StorageError):
    """The device failed a command (EIO and the like, or an end of file where bytes should be)."""


class StoreLocked(StorageError):
    """Another process has this store open. Two gateways on one directory would destroy it."""


class NotAStore(StorageError):
    """The directory holds something, and it is not a store. Nothing in it was touched."""


class UnsupportedFormat(StorageError):
    """The store was written by a newer version. It was not touched."""

    def __init__(self, found: int, supported: int) -> None:
        super().__init__(f"the store has format {found}; this version reads up to {supported}")
        self.found = found
        self.supported = supported
