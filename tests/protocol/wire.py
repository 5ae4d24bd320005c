"""Moving bytes between cores by hand: what the protocol tests share."""

from collections.abc import Iterable

from adp_client.protocol import Connection, Feature, Role
from adp_client.protocol.events import Event
from adp_client.protocol.messages import Hello, Limits, Welcome

BOOT = b"boot-id-16-bytes"
NAMESPACE = bytes(range(32))


def receive(
    connection: Connection, raw: bytes, chunk: int = 1 << 20, *, descriptors: int = 0
) -> Iterable[Event]:
    """Give `raw` to a core, at most `chunk` bytes at a time, with memory of its own for every payload.

    `descriptors` come along with the first of them.
    """
    rest = memoryview(raw)
    while rest:
        views = connection.receive_buffers()
        assert views, "the core wants memory that nobody gave"
        room = 0
        for view in views:
            count = min(len(view), len(rest), chunk - room)
            view[:count] = rest[:count]
            rest, room = rest[count:], room + count
            if count < len(view):
                break
        connection.bytes_received(room, descriptors=descriptors)
        descriptors = 0
        yield from drain(connection)


def drain(connection: Connection) -> Iterable[Event]:
    """Every event that is ready, accepting payloads into fresh memory."""
    while (event := connection.next_event()) is not None:
        yield event
        if connection.is_waiting_for_memory:
            lengths = event.lengths  # type: ignore[union-attr]
            connection.accept_payload([memoryview(bytearray(length)) for length in lengths])


def pair(
    *,
    features: Feature = Feature.NONE,
    limits: Limits | None = None,
    hello: Hello | None = None,
) -> tuple[Connection, Connection]:
    """A client and a gateway that have shaken hands."""
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    list(receive(gateway, client.hello(hello or Hello(features=features))))
    welcome = Welcome(boot_id=BOOT, features=features, limits=limits or Limits())
    list(receive(client, gateway.accept(welcome)))
    return client, gateway
