"""READ, from the pins on its objects to the frames that carry them."""

from collections.abc import Sequence

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import Read, ReadItem, ReadReply
from adp_client.transport import FileRange
from adp_client.transport.base import Part

from .answers import Answers
from .outbox import Frame
from .replies import Found, cut_extents, joined, portions, read_frames
from .store.base import Extent, ObjectStore, ReadLease


class Reads:
    """The READs of one connection."""

    def __init__(self, answers: Answers, store: ObjectStore) -> None:
        self._answers = answers
        self._store = store
        self._unframed: dict[int, dict[int, ReadLease]] = {}

    @property
    def unframed(self) -> list[ReadLease]:
        """Objects that are pinned and whose last byte is in no frame yet."""
        return [lease for leases in self._unframed.values() for lease in leases.values()]

    async def answer(self, request_id: int, message: Read) -> None:
        """Pin, verify, send. The next batch is verified while the one before it is being sent.

        A client that verifies end to end is sent the bytes as they are: its check covers all that ours would,
        and the way here too; what it finds damaged, it names in a CHECK.
        """
        is_end_to_end = Feature.END_TO_END in self._answers.connection.features
        opened = self._store.open_read(message.namespace, message.keys)
        # Owned by no frame yet.
        leases = {index: lease for index, lease in enumerate(opened) if lease is not None}
        self._unframed[request_id] = leases
        try:
            failed = [
                ReadItem(index=index, status=ErrorCode.NOT_FOUND)
                for index, lease in enumerate(opened)
                if lease is None
            ]
            for index in [index for index, lease in leases.items() if not self._fits(message, index, lease)]:
                lease = leases.pop(index)
                failed.append(ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=lease.length))
                lease.release()
            lengths = {index: lease.length for index, lease in leases.items()}
            batches = [list(leases)] if is_end_to_end or not leases else list(portions(lengths))
            for number, batch in enumerate(batches, 1):
                if not is_end_to_end:
                    statuses = await self._store.verify([leases[index] for index in batch])
                    for index, status in zip(batch, statuses, strict=True):
                        if status:
                            failed.append(ReadItem(index=index, status=ErrorCode(status)))
                            leases.pop(index).release()
                    batch = [index for index in batch if index in leases]
                await self._send_objects(request_id, failed, batch, leases, is_last=number == len(batches))
                failed = []
        finally:
            del self._unframed[request_id]
            for lease in leases.values():
                lease.release()

    def _fits(self, message: Read, index: int, lease: ReadLease) -> bool:
        """Whether the reader has room for the object, and frames in which it can travel."""
        return lease.length <= message.capacities[index] and (
            self._answers.max_payload_bytes > 0 or not lease.length
        )

    async def _send_objects(
        self,
        request_id: int,
        failed: Sequence[ReadItem],
        batch: Sequence[int],
        leases: dict[int, ReadLease],
        *,
        is_last: bool,
    ) -> None:
        found = Found(
            tuple(batch),
            tuple([leases[index].length for index in batch]),
            tuple([leases[index].checksum for index in batch]),
        )
        frames = read_frames(
            failed,
            found,
            max_payload_bytes=self._answers.max_payload_bytes,
            max_body_bytes=self._answers.max_body_bytes,
        )
        following = next(frames, None)
        while (items := following) is not None:
            # One at a time: a client that takes small frames has many, and there is room for a few.
            following = next(frames, None)
            is_final = is_last and following is None
            head = self._answers.encode(request_id, ReadReply(items=items), is_final=is_final)
            payload_bytes = sum(items.lengths)
            self._answers.shared.counters.sent_bytes += payload_bytes
            extents: list[Extent] = []
            if items.is_whole:
                reads = [leases.pop(index) for index in items.indices]
                owned = reads
                for lease in reads:
                    extents += lease.extents
            else:
                reads, owned = [], []
                for item in items:
                    if item.status is ErrorCode.OK:
                        lease = leases[item.index]
                        extents += cut_extents(lease.extents, item.offset, item.length)
                        reads.append(lease)
                        if item.offset + item.length == item.object_bytes:
                            owned.append(leases.pop(item.index))
            parts: list[Part] = [head]
            parts += [FileRange(extent.fd, extent.offset, extent.length) for extent in joined(extents)]
            await self._answers.outbox.put(
                Frame(parts=parts, payload_bytes=payload_bytes, owned=owned, reads=reads)
            )
