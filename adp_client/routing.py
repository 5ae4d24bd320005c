"""Which lane a call takes: the only one, or with several workers one for each part of its vector.

A client begins with one lane, to whoever answers at its endpoint. If that is a worker, the handshake names
all of them (spec section 4.5): the link becomes that worker's, and there is a lane for each of the others. A
vector is cut by the workers that keep its keys, its parts are asked side by side, and the answers are put
together in the order of the keys. Fragments go with their object, so a part is a whole call at its worker.

A worker that is gone fails its part. While others can be reached, that is a miss, or an object that was not
stored; a DELETE has to be done or raise, so it waits. If none can be reached, the call waits for the gateway
as it does for one without workers.
"""

import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

import anyio
import anyio.abc
import anyio.lowlevel
import attrs
from typing_extensions import Buffer

from .config import ClientConfig
from .lane import MOVED, Lane
from .leases import Lease
from .link import Dialer, Link, Route
from .operations import ControlOperation, Rerouted
from .ordering import Call, Order
from .placing import Part, merge_statuses, part_vector, pick, place_endpoint
from .protocol.constants import ErrorCode
from .protocol.errors import ConnectFailed, LinkLost, RequestError, RequestTimeout
from .protocol.messages import Fence, Ping
from .protocol.workers import WorkerMap
from .regions import RegionSlice
from .sharing import read_operation, write_operation
from .stats import ClientStats
from .transport.endpoints import parse_endpoint

T = TypeVar("T")

#: That hash what is to be written: more would only take cores, and the interpreter, from reads.
HASH_THREADS = 2

#: How a worker fails: it cannot be reached, or does not answer.
_FAILURES = (ConnectFailed, LinkLost, RequestTimeout)


@attrs.define
class _Answer(Generic[T]):
    """What became of a part: a value, or an error of the worker or of its network."""

    part: Part
    value: T | None = None
    error: Exception | None = None


class Router:
    """All lanes of a client; a `link.Switchboard`. Tasks are started in `tasks`, which its owner cancels."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        dial: Dialer,
        stats: ClientStats,
        source: random.Random,
        order: Order,
        tasks: anyio.abc.TaskGroup,
    ) -> None:
        self._config = config
        self._dial = dial
        self._stats = stats
        self._source = source
        self._order = order
        self._tasks = tasks
        self._hashing = anyio.CapacityLimiter(HASH_THREADS)
        self._told: WorkerMap | None = None
        self._is_known = False  # somebody has answered, so that `_told` is more than a guess
        self._is_closing = False
        self.lanes: tuple[Lane, ...] = (self._add(self._new_link()),)

    # ------------------------------------------------------------ lanes

    def _new_link(self) -> Link:
        link = Link(self._config, dial=self._dial, stats=self._stats, source=self._source, switchboard=self)
        self._tasks.start_soon(link.run)
        return link

    def _add(self, link: Link) -> Lane:
        seconds = self._config.timeouts.request_seconds
        lane = Lane(
            link,
            order=self._order,
            stats=self._stats,
            hashing=self._hashing,
            request_seconds=seconds,
        )
        self._tasks.start_soon(lane.report_damage)
        return lane

    @property
    def is_closing(self) -> bool:
        """No more calls are taken."""
        return self._is_closing or self.lanes[0].link.is_closing

    def is_reachable(self) -> bool:
        """See Switchboard."""
        return any(lane.is_open for lane in self.lanes)

    def opened(self, link: Link) -> None:
        """See Switchboard. Where one worker is back, the others may be."""
        self._is_known = True
        for lane in self.lanes:
            if lane.link is not link and not lane.is_open:
                lane.link.hurry()

    def reroute(self, link: Link, told: WorkerMap | None) -> None:
        """See Switchboard."""
        if self._is_closing or all(lane.link is not link for lane in self.lanes):
            raise ConnectionAbortedError("the client needs no such connection any more")
        home = parse_endpoint(self._config.endpoint)
        endpoints = [home] if told is None else [place_endpoint(home, place) for place in told.places]
        before = self.lanes
        for lane in before:
            if lane.link is not link:
                lane.link.retire()
            lane.end()
        self._told, lanes = told, []
        for worker, endpoint in enumerate(endpoints):
            is_here = told is None or worker == told.worker
            each = link if is_here else self._new_link()
            each.lead(endpoint, Route(None if told is None else attrs.evolve(told, worker=worker)))
            lanes.append(self._add(each))
        self.lanes = tuple(lanes)

    async def leave(self) -> None:
        """Say goodbye everywhere, within `goodbye_seconds` all in all. Shielded."""
        self._is_closing = True
        if len(self.lanes) == 1:
            await self.lanes[0].link.leave()
            return
        async with anyio.create_task_group() as tasks:
            for lane in self.lanes:
                tasks.start_soon(lane.link.leave)

    async def wait_connected(self, deadline: float) -> None:
        """Return when there is a connection to each worker that can be reached, at least to one.

        Raises ConnectFailed, LinkClosed.
        """
        while True:
            try:
                for lane in self.lanes:
                    try:
                        await lane.link.wait_open(lane.route, deadline, is_first=True)
                    except ConnectFailed:
                        if not self.is_reachable():
                            raise
                return
            except Rerouted:
                continue

    # ------------------------------------------------------------ verbs

    async def exist(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """See Fragmenting."""

        async def ask(lane: Lane, part: Part, of: Call) -> bytes:
            return await lane.fragmenting.exist(namespace, part.keys, of)

        return await self._statuses(keys, call, ask, ErrorCode.NOT_FOUND)

    async def check(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """See Fragmenting."""

        async def ask(lane: Lane, part: Part, of: Call) -> bytes:
            return await lane.fragmenting.check(namespace, part.keys, of)

        return await self._statuses(keys, call, ask, ErrorCode.NOT_FOUND)

    async def write(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        payloads: Sequence[Buffer | RegionSlice | Sequence[Buffer | RegionSlice]],
        call: Call,
    ) -> bytes:
        """See Fragmenting."""

        async def ask(lane: Lane, part: Part, of: Call) -> bytes:
            return await lane.fragmenting.write(namespace, part.keys, pick(payloads, part.items), of)

        if self._told is not None:  # what is wrong with one is said before any is sent
            write_operation(namespace, keys, payloads).let_go()
        return await self._statuses(keys, call, ask, ErrorCode.GATEWAY_FAULT, payloads)

    async def read(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        memory: Sequence[Buffer | RegionSlice],
        call: Call,
        *,
        is_verified: bool,
    ) -> tuple[bytes, tuple[int, ...]]:
        """See Fragmenting."""

        async def ask(lane: Lane, part: Part, of: Call) -> tuple[bytes, tuple[int, ...]]:
            return await lane.fragmenting.read(
                namespace, part.keys, pick(memory, part.items), of, is_verified=is_verified
            )

        if self._told is not None:  # whether two overlap shows in all of them together
            read_operation(namespace, keys, memory, is_verified=is_verified).let_go()
        answers = await self._answers(keys, call, ask)
        if len(answers) == 1 and answers[0].value is not None:
            return answers[0].value
        _raise_if_retired(answers, memory)
        self._raise_if_hopeless(answers)
        statuses, lengths = bytearray(len(keys)), [0] * len(keys)
        for answer in answers:
            if answer.value is None:
                merge_statuses(statuses, answer.part.items, _instead(answer, ErrorCode.NOT_FOUND))
                continue
            merge_statuses(statuses, answer.part.items, answer.value[0])
            for item, length in zip(answer.part.items, answer.value[1], strict=True):
                lengths[item] = length
        return bytes(statuses), tuple(lengths)

    async def delete(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """See Fragmenting. An error means that a part was not done, or not for certain."""

        async def ask(lane: Lane, part: Part, of: Call) -> bytes:
            return await lane.fragmenting.delete(namespace, part.keys, of)

        while True:
            try:
                answers = await self._ask_once(keys, call, ask, is_patient=True)
            except Rerouted:
                continue
            errors = [answer.error for answer in answers if answer.error is not None]
            failures = [error for error in errors if not isinstance(error, RequestError)]
            if not failures:
                self._raise_if_hopeless(answers)
                return _merged(keys, answers, ErrorCode.REFUSED)
            if len(errors) < len(answers) or any(_may_be_done(error) for error in failures):
                reason = next((str(error) for error in failures if not isinstance(error, Rerouted)), MOVED)
                raise LinkLost(reason, epoch=0, maybe_applied=True) from failures[0]
            for error in failures:
                if not isinstance(error, Rerouted):
                    raise error

    async def exist_leased(
        self, namespace: bytes, keys: tuple[bytes, ...], lease_seconds: float, call: Call
    ) -> tuple[bytes, Lease | None]:
        """See Fragmenting. One lease for all that is OK, or none."""

        async def ask(lane: Lane, part: Part, of: Call) -> tuple[bytes, Lease | None]:
            return await lane.fragmenting.exist_leased(namespace, part.keys, lease_seconds, of)

        answers: list[_Answer[tuple[bytes, Lease | None]]] = []
        try:
            await self._answers(keys, call, ask, into=answers)
            self._raise_if_hopeless(answers)
        except BaseException:
            _give_back(answers)
            raise
        found = [answer.value for answer in answers if answer.value is not None]
        lease = None
        if any(granted is None and ErrorCode.OK in statuses for statuses, granted in found):
            _give_back(answers)
        else:
            lease = Lease.joined([granted for _, granted in found if granted is not None])
        statuses = bytearray(len(keys))
        for answer in answers:
            said = _instead(answer, ErrorCode.NOT_FOUND) if answer.value is None else answer.value[0]
            merge_statuses(statuses, answer.part.items, said)
        return bytes(statuses), lease

    async def fence(self, deadline: float) -> None:
        """Everything that was asked before is done, at every worker, before anything that is asked later."""
        is_wide = self._told is not None or not self._is_known
        async with self._order.fence(deadline, is_wide=is_wide) as call:
            await self._everywhere(Fence(), call)

    async def ping(self, nonce: int, call: Call) -> None:
        """A sign of life of every worker that can be reached."""
        await self._everywhere(Ping(nonce=nonce), call)

    # ------------------------------------------------------------ parts

    async def _everywhere(self, message: Fence | Ping, call: Call) -> None:
        """Ask every worker that there is a connection to: at the others nothing of ours is under way."""
        while True:
            lanes = self.lanes if self._told is None else [lane for lane in self.lanes if lane.is_open]
            try:
                if not lanes:
                    await self.wait_connected(call.deadline)
                    continue
                if len(lanes) == 1:
                    await lanes[0].perform(ControlOperation(message), call)
                    return
                asked = [_Answer[None](Part(at, (), ())) for at in range(len(lanes))]

                async def ask(answer: _Answer[None], lanes: Sequence[Lane] = lanes) -> None:
                    await lanes[answer.part.worker].perform(ControlOperation(message), call.part())

                await _side_by_side(asked, ask)
                errors = [answer.error for answer in asked if answer.error is not None]
                if any(isinstance(error, Rerouted) for error in errors):
                    continue
                for error in errors:
                    if not isinstance(error, ConnectFailed) or not self.is_reachable():
                        raise error
                return
            except Rerouted:
                continue

    async def _statuses(
        self,
        keys: tuple[bytes, ...],
        call: Call,
        ask: "_Ask[bytes]",
        instead: ErrorCode,
        memory: Iterable[object] = (),
    ) -> bytes:
        answers = await self._answers(keys, call, ask)
        if len(answers) == 1 and answers[0].value is not None:
            return answers[0].value
        _raise_if_retired(answers, memory)
        self._raise_if_hopeless(answers)
        return _merged(keys, answers, instead)

    async def _answers(
        self,
        keys: tuple[bytes, ...],
        call: Call,
        ask: "_Ask[T]",
        *,
        into: "list[_Answer[T]] | None" = None,
    ) -> "list[_Answer[T]]":
        """What all workers say, of one map; `into` has what there is also when this raises."""
        answers: list[_Answer[T]] = [] if into is None else into
        while True:
            answers.clear()
            try:
                await self._ask_once(keys, call, ask, into=answers)
            except Rerouted:
                continue
            if not any(isinstance(answer.error, Rerouted) for answer in answers):
                return answers

    async def _ask_once(
        self,
        keys: tuple[bytes, ...],
        call: Call,
        ask: "_Ask[T]",
        *,
        is_patient: bool = False,
        into: "list[_Answer[T]] | None" = None,
    ) -> "list[_Answer[T]]":
        answers: list[_Answer[T]] = [] if into is None else into
        lanes, told = self.lanes, self._told
        if told is None:
            answers.append(_Answer(Part(0, range(len(keys)), keys)))
            answers[0].value = await ask(lanes[0], answers[0].part, call)
            return answers
        call.hold()  # each connection knows only its part, so a fence must know of all of them
        answers.extend(_Answer(part) for part in part_vector(keys, told.count))

        async def run(answer: _Answer[T]) -> None:
            of = call.part(is_patient=is_patient)
            answer.value = await ask(lanes[answer.part.worker], answer.part, of)

        await _side_by_side(answers, run)
        return answers

    def _raise_if_hopeless(self, answers: "Sequence[_Answer[T]]") -> None:
        """Raise the first error if there is nothing but errors, and not because a worker is gone that others
        may stand in for with a miss."""
        if not answers or any(answer.error is None for answer in answers):
            return
        failures = [answer.error for answer in answers if isinstance(answer.error, _FAILURES)]
        if failures and not self.is_reachable():
            raise failures[0]
        if not failures and answers[0].error is not None:
            raise answers[0].error


_Ask = Callable[[Lane, Part, Call], Awaitable[T]]


async def _side_by_side(
    answers: "Sequence[_Answer[T]]", run: "Callable[[_Answer[T]], Awaitable[None]]"
) -> None:
    """Run all of them. What a worker, its network or its map is to blame for is noted; anything else is
    raised when the others have been cancelled."""
    wrong: list[Exception] = []

    async def one(answer: _Answer[T], scope: anyio.CancelScope) -> None:
        try:
            await run(answer)
        except (*_FAILURES, RequestError, Rerouted) as exc:
            answer.error = exc
        except Exception as exc:
            wrong.append(exc)
            scope.cancel()

    if len(answers) <= 1:
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            for answer in answers:
                await one(answer, scope)
    else:
        async with anyio.create_task_group() as tasks:
            for answer in answers:
                tasks.start_soon(one, answer, tasks.cancel_scope)
    if wrong:
        raise wrong[0]


def _merged(keys: Sequence[bytes], answers: "Sequence[_Answer[bytes]]", instead: ErrorCode) -> bytes:
    statuses = bytearray(len(keys))
    for answer in answers:
        said = _instead(answer, instead) if answer.value is None else answer.value
        merge_statuses(statuses, answer.part.items, said)
    return bytes(statuses)


def _instead(answer: "_Answer[T]", code: ErrorCode) -> bytes:
    """The statuses of a part without an answer: why its worker refused it, or `code`."""
    said = answer.error.code if isinstance(answer.error, RequestError) else code
    return bytes([said]) * len(answer.part.items)


def _may_be_done(error: Exception) -> bool:
    return isinstance(error, LinkLost) and error.maybe_applied


def _raise_if_retired(answers: "Iterable[_Answer[T]]", memory: Iterable[object]) -> None:
    """A part that failed may go on writing to a region: no miss, but an error that says so."""
    failures = [answer.error for answer in answers if isinstance(answer.error, _FAILURES)]
    if failures and any(isinstance(each, RegionSlice) and each.region.is_retired for each in memory):
        raise failures[0]


def _give_back(answers: "Iterable[_Answer[tuple[bytes, Lease | None]]]") -> None:
    for answer in answers:
        if answer.value is not None and answer.value[1] is not None:
            answer.value[1].give_back()
