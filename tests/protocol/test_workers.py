"""The extension WORKERS by itself; what is malformed stands in the published vectors."""

import pytest

from adp_client.protocol.errors import LocalProtocolError
from adp_client.protocol.messages import Extension
from adp_client.protocol.workers import Place, WorkerMap, decode_worker_map, encode_worker_map

PORTS = tuple(Place(port=port) for port in (7172, 7173, 7174))
NAMES = (Place(name="kv.sock.0"), Place(name="ü" * 53))


@pytest.mark.parametrize("places", [PORTS, NAMES, tuple(Place(port=at) for at in range(1, 257))])
def test_there_and_back(places):
    told = WorkerMap(gateway_id=bytes(range(16)), places=places, worker=1)
    others = (Extension(tag=7, data=b"x"), encode_worker_map(told), Extension(tag=8, data=b""))
    found = decode_worker_map(others)
    assert found == told
    assert found is not None
    assert (found.worker, found.count) == (1, len(places))


def test_a_gateway_that_is_one_says_nothing_of_workers():
    assert decode_worker_map(()) is None
    assert decode_worker_map([Extension(tag=1, data=b"no workers")]) is None


def test_all_workers_tell_one_map():
    one, other = (WorkerMap(gateway_id=bytes(16), places=PORTS, worker=worker) for worker in (0, 2))
    assert one == other
    assert one != WorkerMap(gateway_id=bytes(15) + b"\1", places=PORTS, worker=0)
    assert one != WorkerMap(gateway_id=bytes(16), places=PORTS[:2], worker=0)


@pytest.mark.parametrize(
    ("places", "worker", "problem"),
    [
        (PORTS[:1], 0, "worker 0 of 1"),
        (PORTS, 3, "worker 3 of 3"),
        ((Place(name="a"), Place(name="b/c")), 0, "not a file name"),
        ((Place(name="a"), Place(name="k" * 108)), 0, "108 bytes"),
        ((Place(name="a"), Place()), 0, "a port or a name"),
        ((Place(port=1), Place(port=1)), 0, "one place"),
    ],
)
def test_a_map_that_no_client_would_take_is_not_told(places, worker, problem):
    with pytest.raises(LocalProtocolError, match=problem):
        encode_worker_map(WorkerMap(gateway_id=bytes(16), places=places, worker=worker))
