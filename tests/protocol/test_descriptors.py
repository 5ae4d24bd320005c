"""Which descriptor belongs to which frame (spec section 5.14): the core counts them."""

import pytest

from adp_client.protocol import Connection, ErrorCode, Feature
from adp_client.protocol.connection import MAX_EARLY_DESCRIPTORS
from adp_client.protocol.errors import LocalProtocolError, RemoteProtocolError
from adp_client.protocol.events import RequestReceived
from adp_client.protocol.messages import (
    Ping,
    ReadItem,
    ReadRegion,
    ReadRegionReply,
    RegionClose,
    RegionOpen,
    RegionTarget,
    Write,
    WriteItem,
)

from .wire import NAMESPACE, drain, pair, receive


def peers() -> tuple[Connection, Connection]:
    return pair(features=Feature.REGIONS)


def opening(client: Connection, number: int = 1) -> bytes:
    return client.request(RegionOpen(region=number, region_bytes=4096))[1]


def regions(events) -> list[int]:
    return [
        event.message.region
        for event in events
        if isinstance(event, RequestReceived) and isinstance(event.message, RegionOpen)
    ]


@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 47, 48, 1000])
def test_a_descriptor_with_the_first_byte(chunk: int) -> None:
    client, gateway = peers()
    assert regions(receive(gateway, opening(client), chunk, descriptors=1)) == [1]
    assert regions(receive(gateway, opening(client, 2), chunk, descriptors=1)) == [2]
    assert len(list(receive(gateway, client.request(Ping())[1]))) == 1


def test_handed_over_together_with_what_came_before() -> None:
    """As the system does it, which tells nobody where exactly the descriptor was."""
    client, gateway = peers()
    before = client.request(Ping())[1] + client.request(RegionClose(region=7))[1]
    events = list(receive(gateway, before + opening(client), descriptors=1))
    assert len(events) == 3
    assert regions(events) == [1]


def test_handed_over_with_the_rest_of_the_frame_before() -> None:
    """Two are waiting for their frames then, of which none is whole."""
    client, gateway = peers()
    first, second = opening(client, 1), opening(client, 2)
    assert list(receive(gateway, first[:10], descriptors=1)) == []
    assert regions(receive(gateway, first[10:] + second[:5], descriptors=1)) == [1]
    assert regions(receive(gateway, second[5:])) == [2]


def test_behind_a_payload() -> None:
    client, gateway = peers()
    write = Write(namespace=NAMESPACE, keys=(b"k",), items=(WriteItem(object_bytes=5, length=5, checksum=1),))
    raw = client.request(write)[1] + b"hello"
    assert regions(receive(gateway, raw + opening(client), descriptors=1)) == [1]


@pytest.mark.parametrize("count", [0, 2, 16])
def test_none_or_several(count: int) -> None:
    client, gateway = peers()
    with pytest.raises(RemoteProtocolError, match="one descriptor") as failure:
        list(receive(gateway, opening(client), descriptors=count))
    assert failure.value.code is ErrorCode.UNEXPECTED_MESSAGE


def test_too_late() -> None:
    client, gateway = peers()
    raw = opening(client)
    list(receive(gateway, raw[:10]))
    with pytest.raises(RemoteProtocolError, match="one descriptor"):
        list(receive(gateway, raw[10:], descriptors=1))


def test_with_a_frame_that_takes_none() -> None:
    """It is noticed with the next frame at the latest."""
    client, gateway = peers()
    list(receive(gateway, client.request(Ping())[1], descriptors=1))
    with pytest.raises(RemoteProtocolError, match="takes none"):
        list(receive(gateway, opening(client), descriptors=1))


def test_in_the_middle_of_a_frame_again_and_again() -> None:
    """A peer that sends a descriptor with each byte of one frame soon holds no more of them open."""
    client, gateway = peers()
    raw = client.request(RegionClose(region=1))[1]
    for at in range(MAX_EARLY_DESCRIPTORS):
        assert list(receive(gateway, raw[at : at + 1], descriptors=1)) == []
    with pytest.raises(RemoteProtocolError, match="belong to no frame"):
        list(receive(gateway, raw[2:3], descriptors=1))


def test_without_the_feature() -> None:
    """Whatever comes along: the frame is not allowed."""
    client, gateway = pair()
    client.features |= Feature.REGIONS
    raw = opening(client)
    with pytest.raises(RemoteProtocolError, match="REGIONS was not agreed on"):
        list(receive(gateway, raw, descriptors=1))


def test_objects_in_regions_are_whole() -> None:
    client, gateway = peers()
    target = RegionTarget(region=1, offset=0, capacity=100)
    number, raw = client.request(ReadRegion(namespace=NAMESPACE, keys=(b"k",), targets=(target,)))
    list(receive(gateway, raw))
    for row in (
        ReadItem(index=0, object_bytes=10, length=5),
        ReadItem(index=0, object_bytes=10, offset=5, length=5),
        ReadItem(index=0, object_bytes=101, length=101),
    ):
        with pytest.raises(LocalProtocolError):
            gateway.reply(number, ReadRegionReply(items=(row,)))
    whole = ReadRegionReply(items=(ReadItem(index=0, object_bytes=10, length=10),))
    assert len(list(receive(client, gateway.reply(number, whole)))) == 1
    assert list(drain(client)) == []
