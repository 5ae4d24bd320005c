"""One clause, tried on one gateway: its connections, its namespace, and what it has to clear away."""

import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio

from adp_client.protocol.constants import NAMESPACE_BYTES, ErrorCode, Feature
from adp_client.protocol.messages import Delete, Exist, Hello, Limits, Ping, Read, Welcome
from adp_client.transport.base import Transport

from .clause import Broken, NotApplicable, shown
from .peer import ConnectionEnded, Peer, WriteFrame, cut_write

Dial = Callable[[], Awaitable[Transport]]

#: How long a clause waits for something that must not come.
QUIET_SECONDS = 0.1
#: What a gateway may take to clear away after a clause; nothing is judged by it.
CLEAN_SECONDS = 2.0

EVERYTHING = Feature.LEASES | Feature.REGIONS | Feature.FRAGMENTS | Feature.CREDITS | Feature.END_TO_END


class Trial:
    """Handed to a clause's function. Peers that it opened are closed for it afterwards.

    welcome: what the gateway announces to a client that offers every feature.
    """

    def __init__(self, dial: Dial, *, token: bytes | None, welcome: Welcome) -> None:
        self.token = token
        self.welcome = welcome
        self.namespace = os.urandom(NAMESPACE_BYTES)
        self._dial = dial
        self._peers: list[Peer] = []
        self._stored: set[tuple[bytes, bytes]] = set()

    # ------------------------------------------------------------ what the gateway says of itself

    @property
    def limits(self) -> Limits:
        """As announced."""
        return self.welcome.limits

    @property
    def largest_bytes(self) -> int:
        """The largest object that can be written whole: one device command unless the gateway cuts."""
        most = self.limits.max_object_bytes
        if self.welcome.features & Feature.FRAGMENTS:
            return most
        return min(most, self.limits.max_command_bytes)

    def need(self, condition: bool, why_not: str) -> None:
        """Raise NotApplicable unless `condition`."""
        if not condition:
            raise NotApplicable(why_not)

    def keys(self, count: int, *, width: int = 16) -> tuple[bytes, ...]:
        """Different keys, `width` bytes each (or the most that the gateway takes)."""
        width = min(width, self.limits.max_key_bytes)
        return tuple(number.to_bytes(8, "big")[-width:].rjust(width, b"k") for number in range(count))

    # ------------------------------------------------------------ connections

    async def dial(self, hello: Hello | None = None) -> Peer:
        """A connection on which nothing has been said yet."""
        shown_token = self.token or b""
        if hello is None:
            hello = Hello(features=Feature.FRAGMENTS, token=shown_token, agent="conformance")
        peer = Peer(await self._dial(), hello)
        self._peers.append(peer)
        return peer

    async def connect(self, **hello: object) -> Peer:
        """A connection after its handshake. `hello`: fields of HELLO that differ from the usual ones."""
        fields = {
            "features": Feature.FRAGMENTS,
            "token": self.token or b"",
            "agent": "conformance",
            **hello,
        }
        peer = await self.dial(Hello(**fields))  # type: ignore[arg-type]
        await peer.greet()
        return peer

    @property
    def awaits(self) -> str:
        """What the connection that moved last waits for."""
        busy = [peer.awaits for peer in self._peers if peer.awaits != "nothing"]
        return busy[-1] if busy else "a connection"

    async def close(self) -> None:
        """Remove what was stored, and close every connection. Errors are the next clause's business."""
        with anyio.move_on_after(CLEAN_SECONDS, shield=True):
            for peer in self._peers:
                await peer.transport.aclose()
            try:
                await self._remove()
            except (ConnectionEnded, Broken, OSError, EOFError):
                return

    async def _remove(self) -> None:
        if not self._stored:
            return
        by_kind: dict[tuple[bytes, int], list[bytes]] = {}
        for namespace, key in self._stored:
            by_kind.setdefault((namespace, len(key)), []).append(key)
        peer = await self.connect()
        try:
            for (namespace, width), keys in by_kind.items():
                step = max(1, min(self.limits.max_items, (self.limits.max_body_bytes - 48) // width))
                for at in range(0, len(keys), step):
                    await peer.call(Delete(namespace=namespace, keys=tuple(keys[at : at + step])))
        finally:
            await peer.transport.aclose()

    # ------------------------------------------------------------ the usual steps

    async def write(
        self,
        peer: Peer,
        objects: Iterable[tuple[bytes, bytes]],
        *,
        namespace: bytes | None = None,
        frame_bytes: int | None = None,
    ) -> list[ErrorCode]:
        """A WRITE from its first frame to its reply; the status of each object."""
        request_id = await self.begin_write(peer, objects, namespace=namespace, frame_bytes=frame_bytes)
        return (await peer.answer(request_id)).statuses

    async def begin_write(
        self,
        peer: Peer,
        objects: Iterable[tuple[bytes, bytes]],
        *,
        namespace: bytes | None = None,
        frame_bytes: int | None = None,
        frames: int | None = None,
    ) -> int:
        """Send a WRITE, or only its first `frames` frames."""
        room = self.limits.max_payload_bytes if frame_bytes is None else frame_bytes
        cut = self.frames_of(objects, room, namespace=namespace)
        request_id: int | None = None
        for number, frame in enumerate(cut[:frames], 1):
            request_id, raw = peer.say(frame.message, request_id=request_id, is_final=number == len(cut))
            await peer.send(raw, *frame.parts)
        assert request_id is not None
        return request_id

    def frames_of(
        self, objects: Iterable[tuple[bytes, bytes]], frame_bytes: int, *, namespace: bytes | None = None
    ) -> list[WriteFrame]:
        """The frames of a WRITE, with `frame_bytes` bytes of objects in each, for a clause to send itself."""
        pairs = list(objects)
        namespace = self.namespace if namespace is None else namespace
        self.will_remove(*(key for key, _ in pairs), namespace=namespace)
        return cut_write(namespace, pairs, frame_bytes)

    def will_remove(self, *keys: bytes, namespace: bytes | None = None) -> None:
        """Objects that may be stored now, and are to be deleted after the clause."""
        namespace = self.namespace if namespace is None else namespace
        self._stored |= {(namespace, key) for key in keys}

    async def store(self, peer: Peer, objects: Iterable[tuple[bytes, bytes]]) -> None:
        """`write`, which must succeed."""
        for status in await self.write(peer, objects):
            if status is not ErrorCode.OK:
                raise Broken(f"WRITE of an object that fits: expected OK, got {status.name}")

    async def exist(self, peer: Peer, keys: Sequence[bytes]) -> list[ErrorCode]:
        """EXIST; the status of each key."""
        return (await peer.call(Exist(namespace=self.namespace, keys=tuple(keys)))).statuses

    async def read(
        self, peer: Peer, keys: Sequence[bytes], *, capacity: int | None = None
    ) -> list[bytes | None]:
        """READ; each object, or None. Room for each: its share of the window unless `capacity` says less."""
        if capacity is None:
            share = self.limits.max_inflight_bytes // 2 // len(keys)  # a WRITE may be under way
            capacity = min(self.limits.max_object_bytes, share)
        message = Read(namespace=self.namespace, keys=tuple(keys), capacities=(capacity,) * len(keys))
        return (await peer.call(message)).objects()

    async def expect_objects(self, peer: Peer, objects: Sequence[tuple[bytes, bytes | None]]) -> None:
        """READ brings exactly these; None: a miss."""
        found = await self.read(peer, [key for key, _ in objects])
        for (key, expected), got in zip(objects, found, strict=True):
            if expected != got:
                raise Broken(f"READ of {key!r}: expected {_thing(expected)}, got {_thing(got)}")

    async def ping(self, peer: Peer, nonce: int = 7) -> None:
        """PING, which must be answered."""
        await peer.pong(await peer.ask(Ping(nonce=nonce)), nonce)

    async def expect_silence(self, peer: Peer, request_id: int, why: str) -> None:
        """The request must not be answered yet."""
        with anyio.move_on_after(QUIET_SECONDS):
            while not peer.is_answered(request_id):
                await peer.listen()
        if peer.is_answered(request_id):
            raise Broken(f"expected no reply {why} yet, got one")

    async def expect_violation(self, peer: Peer, raw: bytes, *codes: ErrorCode) -> None:
        """`raw` is a violation: ERROR with one of `codes`, then the end; a bystander goes on."""
        bystander = await self.connect()
        await peer.send(raw)
        await self.expect_error(peer, *codes)
        await self._expect_alive(bystander)

    async def expect_violations(
        self, cases: Mapping[str, bytes], *codes: ErrorCode, is_greeted: bool = True
    ) -> None:
        """The same for each of `cases`, on connections of their own, side by side: closing may take its time.

        Not `is_greeted`: what is said stands in the place of HELLO.
        """
        bystander = await self.connect()
        peers: dict[str, Peer] = {}
        for name, raw in cases.items():
            peers[name] = peer = await (self.connect() if is_greeted else self.dial())
            if not is_greeted:
                peer.connection.hello(peer.hello)
            await peer.send(raw)
        for name, peer in peers.items():
            await self.expect_error(peer, *codes, subject=f"{name}: ")
        await self._expect_alive(bystander)

    async def _expect_alive(self, bystander: Peer) -> None:
        try:
            await self.ping(bystander)
        except ConnectionEnded as ending:
            raise Broken(f"expected another connection to go on, got: {ending}") from None

    async def expect_error(self, peer: Peer, *codes: ErrorCode, subject: str = "") -> None:
        """The gateway says ERROR with one of `codes`, and closes."""
        wanted = f"{subject}expected ERROR {' or '.join(code.name for code in codes)}"
        try:
            error = await peer.ended()
        except Broken as exc:  # a reply, for instance
            raise Broken(f"{wanted}; {exc}") from exc
        if error is None:
            raise Broken(f"{wanted} and then the end, got the end without a word")
        if error.code not in codes:
            raise Broken(f"{wanted}, got {error.code.name}: {error.text}")

    async def delete(self, peer: Peer, keys: Sequence[bytes]) -> list[ErrorCode]:
        """DELETE; the status of each key."""
        return (await peer.call(Delete(namespace=self.namespace, keys=tuple(keys)))).statuses


def content(size: int, seed: int = 0) -> bytes:
    """`size` bytes that differ from place to place and from seed to seed."""
    stem = b"".join((seed * 1_000_003 + at).to_bytes(8, "little") for at in range(min(size, 4096) // 8 + 1))
    return (stem * (size // len(stem) + 1))[:size]


def _thing(value: bytes | None) -> str:
    return "a miss" if value is None else f"an object of {shown(value)}"
