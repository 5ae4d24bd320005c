"""Which worker keeps what, and vectors cut and put together again."""

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from adp_client.placing import merge_statuses, part_vector, pick, place_endpoint, workers_of
from adp_client.protocol.workers import Place
from adp_client.transport import parse_endpoint

vectors = st.lists(st.binary(min_size=1, max_size=128), max_size=40).map(tuple)
counts = st.integers(2, 256)


@given(vectors, counts)
def test_every_key_has_the_worker_that_the_spec_names(keys, count):
    assert list(workers_of(keys, count)) == [xxhash.xxh3_64_intdigest(key) % count for key in keys]


@given(vectors, counts)
def test_the_parts_of_a_vector_are_all_of_it_in_order(keys, count):
    parts = list(part_vector(keys, count))
    assert sorted(item for part in parts for item in part.items) == list(range(len(keys)))
    assert len({part.worker for part in parts}) == len(parts)
    for part in parts:
        assert part.keys == tuple(keys[item] for item in part.items) == tuple(pick(keys, part.items))
        assert list(part.items) == sorted(part.items)
        assert set(workers_of(part.keys, count)) == {part.worker}


@given(vectors, counts, st.randoms(use_true_random=False))
def test_what_is_said_of_the_parts_is_said_of_the_whole(keys, count, source):
    said = bytes(source.choice((0, 0, 0, 1, 7)) for _ in keys)
    whole = bytearray(len(keys))
    for part in part_vector(keys, count):
        merge_statuses(whole, part.items, bytes(pick(said, part.items)))
    assert bytes(whole) == said


def test_the_keys_of_an_engine_spread_evenly():
    """The chained hashes of blocks, at their full length, with group and shard behind."""
    keys = [at.to_bytes(32, "big") + bytes(8) for at in range(10_000)]
    for count in (2, 3, 8):
        places = workers_of(keys, count)
        for worker in range(count):
            assert abs(places.count(worker) - 10_000 / count) < 5 * (10_000 / count) ** 0.5


@pytest.mark.parametrize(
    ("dialled", "place", "endpoint"),
    [
        ("tcp://gateway:7171", Place(port=7), "tcp://gateway:7"),
        ("tls://[::1]:7171", Place(port=65535), "tls://[::1]:65535"),
        ("unix:///run/adp/kv.sock", Place(name="kv.sock.1"), "unix:///run/adp/kv.sock.1"),
        ("unix:///kv.sock", Place(name="other"), "unix:///other"),
        ("tcp://gateway:7171", Place(name="kv"), None),
        ("unix:///kv.sock", Place(port=1), None),
        ("unix:///" + "d" * 60 + "/kv.sock", Place(name="k" * 60), None),
    ],
)
def test_places_are_where_the_client_dialled(dialled, place, endpoint):
    if endpoint is None:
        with pytest.raises(ValueError, match=r"worker at|at most"):
            place_endpoint(parse_endpoint(dialled), place)
    else:
        assert str(place_endpoint(parse_endpoint(dialled), place)) == endpoint
