"""A proxy between real sockets that holds, dribbles, cuts, resets or falls silent at an exact byte.

    async with Proxy(parse_endpoint(served.endpoints[0])) as proxy:
        proxy.plan(to_client=Way(stop_at=1000, then="hold"))       # of the next connection
        async with Client(ClientConfig(endpoint=proxy.endpoint)) as client: ...

Nothing here waits for a time: a test waits for `Way.reached`, and lets go with `Way.go`.
"""

import contextlib
import socket
import struct
from collections import deque
from typing import Literal, Self

import anyio
import anyio.abc
import attrs

from adp_client.transport import SocketTransport, Transport, connect
from adp_client.transport.endpoints import Endpoint

CHUNK_BYTES = 64 << 10


@attrs.define(kw_only=True)
class Way:
    """One direction of a connection. Bytes count from its beginning; `stop_at` may be set at any time.

    then: what happens when `stop_at` bytes have passed. "hold": nothing more passes until `go` is set, and
        nobody notices anything. "close": both ends are closed as after a polite end. "reset": as by a peer
        that crashed (TCP: RST).
    """

    stop_at: int | None = None
    then: Literal["hold", "close", "reset"] = "hold"
    dribble: bool = False  # one byte at a time
    passed_bytes: int = 0
    reached: anyio.Event = attrs.field(factory=anyio.Event)
    go: anyio.Event = attrs.field(factory=anyio.Event)


@attrs.define
class Connection:
    """Both directions of one connection through the proxy."""

    to_gateway: Way
    to_client: Way
    ended: anyio.Event = attrs.field(factory=anyio.Event)
    must_end: anyio.Event = attrs.field(factory=anyio.Event)
    is_reset: bool = False

    def reset(self) -> None:
        """End it now as by a peer that crashed."""
        self.is_reset = True
        self.must_end.set()

    def hold(self) -> None:
        """From now on nothing passes either way, and nothing ends."""
        for way in (self.to_gateway, self.to_client):
            way.stop_at, way.then = way.passed_bytes, "hold"


class Proxy:
    """See the module. Plain ways for every connection that has no plan."""

    def __init__(self, upstream: Endpoint) -> None:
        self._upstream = upstream
        self._plans: deque[tuple[Way, Way]] = deque()
        self.connections: list[Connection] = []
        self.is_refusing = False

    def plan(self, *, to_gateway: Way | None = None, to_client: Way | None = None) -> tuple[Way, Way]:
        """Ways for the next connection that has none yet."""
        ways = (to_gateway or Way(), to_client or Way())
        self._plans.append(ways)
        return ways

    @property
    def open_connections(self) -> int:
        """Connections that have not ended."""
        return sum(not connection.ended.is_set() for connection in self.connections)

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._accept)
        return self

    async def __aexit__(self, *exc_info: object) -> bool | None:
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(*exc_info)  # type: ignore[arg-type]
        finally:
            self._listener.close()

    async def _accept(self) -> None:
        while True:
            await anyio.wait_readable(self._listener)
            with contextlib.suppress(BlockingIOError):
                sock, _ = self._listener.accept()
                if self.is_refusing:
                    _reset(sock)
                    continue
                connection = Connection(*(self._plans.popleft() if self._plans else (Way(), Way())))
                self.connections.append(connection)
                self._tasks.start_soon(self._serve, SocketTransport(sock), connection)

    async def _serve(self, client: SocketTransport, connection: Connection) -> None:
        gateway: SocketTransport | None = None
        try:
            gateway = await connect(self._upstream)
            async with anyio.create_task_group() as tasks:
                for source, target, way in (
                    (client, gateway, connection.to_gateway),
                    (gateway, client, connection.to_client),
                ):
                    tasks.start_soon(self._pump, source, target, way, connection)
                await connection.must_end.wait()
                tasks.cancel_scope.cancel()
            if connection.is_reset:
                for end in (client, gateway):
                    _reset(end.raw_socket)
        except OSError:
            pass  # nobody listens upstream
        finally:
            with anyio.CancelScope(shield=True):
                await client.aclose()
                if gateway is not None:
                    await gateway.aclose()
            connection.ended.set()

    async def _pump(self, source: Transport, target: Transport, way: Way, connection: Connection) -> None:
        view = memoryview(bytearray(CHUNK_BYTES))
        with contextlib.suppress(OSError):
            while True:
                count = await source.receive_some([view[:1] if way.dribble else view])
                if not count:
                    break
                at = 0
                while at < count:  # the plan may change at each wait
                    room = count - at if way.stop_at is None else way.stop_at - way.passed_bytes
                    if room <= 0:
                        await self._stop(way, connection)
                        continue
                    step = min(room, count - at)
                    await target.send([view[at : at + step]])
                    way.passed_bytes += step
                    at += step
                if way.stop_at == way.passed_bytes:
                    await self._stop(way, connection)
        if way.stop_at is not None and way.then == "hold":
            await way.go.wait()  # that an end has gone would be noticed
        connection.must_end.set()

    async def _stop(self, way: Way, connection: Connection) -> None:
        way.reached.set()
        if way.then == "hold":
            await way.go.wait()
            way.stop_at = None
            return
        connection.is_reset = way.then == "reset"
        connection.must_end.set()
        await anyio.sleep_forever()


def _reset(sock: socket.socket) -> None:
    """Close `sock` with RST instead of FIN."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
