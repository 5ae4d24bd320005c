"""WRITE: where its payload goes, when its objects are whole, and what is said of them."""

import math

import anyio
import anyio.abc
import attrs

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import StatusReply, Write

from .admission import message_bytes
from .answers import Answers
from .buffers import Block, lay_out
from .fences import Era, Fences
from .store.base import ObjectStore, PutItem


@attrs.define(eq=False)
class _OpenObject:
    """An object whose last byte has not come yet. `memory` is None if there was none to be had."""

    index: int
    block: Block
    memory: memoryview | None


@attrs.define(eq=False)
class _Batch:
    """The objects that one frame of a WRITE completes, and the memory they lie in."""

    indices: list[int] = attrs.field(factory=list)
    items: list[PutItem] = attrs.field(factory=list)
    blocks: list[Block] = attrs.field(factory=list)

    def release(self) -> None:
        self.items.clear()
        for block in self.blocks:
            block.release()


@attrs.define(eq=False)
class _Write:
    """A WRITE from its first frame to its reply."""

    era: Era
    cost_bytes: int
    is_refused: bool
    statuses: bytearray = attrs.field(factory=bytearray)
    open: _OpenObject | None = None
    batch: _Batch | None = None  # of the frame whose payload is on its way
    puts: int = 0
    is_asked: bool = False

    @property
    def is_holding(self) -> bool:
        """Whether memory is kept for bytes that its client still owes."""
        blocks = [] if self.batch is None else list(self.batch.blocks)
        if self.open is not None:
            blocks.append(self.open.block)
        return any(block.length for block in blocks)

    def release(self) -> None:
        """Its connection is gone."""
        if self.open is not None:
            self.open.block.release()
        if self.batch is not None:
            self.batch.release()


class Writes:
    """The WRITEs of one connection, from the first frame of each to its reply."""

    def __init__(self, answers: Answers, store: ObjectStore, fences: Fences) -> None:
        self._answers = answers
        self._store = store
        self._fences = fences
        self._writes: dict[int, _Write] = {}
        self._patient_again = -math.inf  # when this connection may wait for memory again

    @property
    def is_owed_frames(self) -> bool:
        """Whether a WRITE has begun whose last frame has not come."""
        return any(not write.is_asked for write in self._writes.values())

    @property
    def is_holding(self) -> bool:
        """Whether memory is kept for bytes that the client still owes."""
        return any(write.is_holding for write in self._writes.values())

    def release(self) -> None:
        """The connection is gone: give the memory back now. Idempotent."""
        for write in self._writes.values():
            write.release()

    def leave(self) -> None:
        """`release`, and leave the house: nothing of these is under way any more."""
        self.release()
        for write in self._writes.values():
            self._answers.shared.admission.leave(write.cost_bytes)
        self._writes.clear()

    async def find_memory(self, request_id: int, message: Write) -> list[memoryview | None]:
        """Where the payload of one frame goes. Waiting here is the back-pressure on this connection."""
        write = self._writes.get(request_id)
        if write is None:
            write = self._begin(request_id, message)
        batch = write.batch = _Batch()
        if write.is_refused:
            write.statuses += bytes([ErrorCode.OVERLOADED]) * sum(not item.offset for item in message.items)
            return [None] * len(message.items)
        if not write.era.is_open and not self._fences.is_asking_before_current:
            await write.era.opened.wait()  # hold no memory behind a fence, unless frames before it are owed
        fresh = [item for item in message.items if not item.offset]
        # An object that goes on in the next frame outlives this one: its memory is a block of its own.
        spans = bool(fresh) and fresh[-1].length < fresh[-1].object_bytes
        whole, whole_bytes = lay_out([item.object_bytes for item in (fresh[:-1] if spans else fresh)])
        _, span_bytes = lay_out([fresh[-1].object_bytes] if spans else [])
        block = await self._take_block(whole_bytes + span_bytes)
        span: Block | None = None
        if block is not None:
            span = block.split(whole_bytes)
            batch.blocks.append(block)
        starts = iter(whole)
        targets: list[memoryview | None] = []
        for key, item in zip(message.keys, message.items, strict=True):
            end = item.offset + item.length
            memory: memoryview | None = None
            if item.offset:
                assert write.open is not None
                index, memory = write.open.index, write.open.memory
                if end == item.object_bytes:
                    batch.blocks.append(write.open.block)
                    write.open = None
            else:
                index = len(write.statuses)
                write.statuses.append(ErrorCode.OVERLOADED)  # unless it is stored
                if end < item.object_bytes:
                    if span is not None:
                        memory = span.view(0, item.object_bytes)
                    write.open = _OpenObject(index, span or self._answers.shared.arena.nothing(), memory)
                elif block is not None:
                    memory = block.view(next(starts), item.object_bytes)
            if memory is not None and end == item.object_bytes:
                batch.indices.append(index)
                batch.items.append(PutItem(key=key, checksum=item.checksum, data=memory))
            targets.append(None if memory is None else memory[item.offset : end])
        return targets

    def _begin(self, request_id: int, message: Write) -> _Write:
        self._answers.meter.begin(request_id, message)
        cost_bytes = message_bytes(message)
        is_refused = not self._answers.shared.admission.admit(cost_bytes)
        write = _Write(self._fences.enter(), 0 if is_refused else cost_bytes, is_refused)
        write.era.asking += 1
        self._writes[request_id] = write
        return write

    async def _take_block(self, length: int) -> Block | None:
        """Memory for one frame. None: too little of it, for too long.

        The reader waits here, and with it everything that the client has asked behind this frame. So a
        connection that has waited in vain does not wait again for as long: half of its time is the client's.
        """
        if not length:
            return self._answers.shared.arena.nothing()
        block = self._answers.shared.arena.take_nowait(length)
        if block is not None:
            return block
        memory_seconds = self._answers.shared.patience.memory_seconds
        if anyio.current_time() < self._patient_again:
            return None
        is_urgent = any(write.open for write in self._writes.values())
        with anyio.move_on_after(memory_seconds):
            return await self._answers.shared.arena.take(length, is_urgent=is_urgent)
        self._patient_again = anyio.current_time() + memory_seconds
        return None

    async def take(
        self, request_id: int, message: Write, is_final: bool, requests: anyio.abc.TaskGroup
    ) -> None:
        """One frame of a WRITE is in."""
        write = self._writes.get(request_id)
        if write is None or write.batch is None:  # a frame without payload: empty objects only
            await self.find_memory(request_id, message)
            write = self._writes[request_id]
        batch, write.batch = write.batch, None
        assert batch is not None
        self._answers.shared.counters.received_bytes += sum(item.length for item in message.items)
        if is_final:
            write.is_asked = True
            write.era.asking -= 1
        if batch.items:
            write.puts += 1
            requests.start_soon(self._put, request_id, write, message.namespace, batch)
        else:
            batch.release()
            self._finish(request_id, write)

    async def _put(self, request_id: int, write: _Write, namespace: bytes, batch: _Batch) -> None:
        """The task of one frame of a WRITE."""
        try:
            await write.era.opened.wait()
            try:
                statuses = await self._store.put_many(namespace, batch.items)
            except Exception as exc:
                statuses = bytes([self._answers.code_for(exc)] * len(batch.items))
            for index, status in zip(batch.indices, statuses, strict=True):
                write.statuses[index] = status
        finally:
            batch.release()
        write.puts -= 1
        self._finish(request_id, write)

    def _finish(self, request_id: int, write: _Write) -> None:
        if not write.is_asked or write.puts or self._answers.is_over:
            return
        del self._writes[request_id]
        if not write.is_refused:
            self._answers.shared.admission.leave(write.cost_bytes)
        if write.is_refused or set(write.statuses) == {ErrorCode.OVERLOADED}:
            # In one word if none of it was taken: that has room to say when to come back.
            refusal = self._answers.refusal(StatusReply, ErrorCode.OVERLOADED)
            self._answers.prompt(request_id, refusal, unanswered=len(write.statuses))
        else:
            self._answers.statuses(request_id, bytes(write.statuses))
        self._fences.leave(write.era)
