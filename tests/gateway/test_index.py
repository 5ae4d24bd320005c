"""The index against a dictionary: whatever is put, overwritten, used, forgotten, in whatever lots."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from adp_gateway.store.base import Status
from adp_gateway.store.format import MAX_KEY_BYTES
from adp_gateway.store.index import FEW, Entry, Index
from adp_gateway.store.table import ENTRY, MAX_USES, MULTIPLIERS, Table
from gateway.objects import NAMESPACE, OTHER_NAMESPACE

_draw = random.Random(1)
DRAWN = [_draw.randrange(2**64) for _ in range(MULTIPLIERS)]
#: Of the secrets that can be drawn, the worst: every key has the same hash.
ONE_CHAIN = [0] * MULTIPLIERS
#: Tags tell keys apart only by their first word, which is the namespace and then four bytes of the key.
FEW_TAGS = [0, 1 << 32, 1 << 32] + [0] * (MULTIPLIERS - 3)

SEGMENTS = (1, 2, 3)
namespaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE, bytes(32)])
#: Few enough to meet again. Zeros at the end are part of a key, and so is its length.
sizes = st.sampled_from([1, 3, 4, 5, 8, 40, MAX_KEY_BYTES])
numbers = st.integers(0, 40)


def named(number: int, size: int) -> bytes:
    """A key. Those of numbers that differ by 256 agree in their first byte, and in the last of several."""
    return number.to_bytes(2, "little")[:size].ljust(size, b"\0")


keys = st.builds(named, numbers, sizes)
#: Lots on both sides of where Python gives way to numpy.
lots = st.one_of(
    st.lists(keys, max_size=2 * FEW),
    st.builds(lambda ns, size: [named(n, size) for n in ns], st.lists(numbers, max_size=3 * FEW), sizes),
)


class IndexMachine(RuleBasedStateMachine):
    @initialize(secret=st.sampled_from([DRAWN, ONE_CHAIN, FEW_TAGS]))
    def begin(self, secret: list[int]) -> None:
        self.index = Index(secret)
        self.model: dict[tuple[bytes, bytes], Entry] = {}
        self.made = 0
        self.pairs: dict[tuple[int, int], tuple[bytes, bytes]] = {}

    def entry(self, segment_id: int, uses: int = 0) -> Entry:
        self.made += 1
        return Entry(segment_id, 4096 * self.made, self.made % 7, 2**64 - self.made, self.made, uses)

    @rule(namespace=namespaces, key=keys, segment_id=st.sampled_from(SEGMENTS), uses=st.integers(0, 3))
    def put(self, namespace: bytes, key: bytes, segment_id: int, uses: int) -> None:
        entry = self.model[namespace, key] = self.entry(segment_id, uses)
        self.index.put(namespace, key, entry)

    @rule(
        namespace=namespaces,
        names=st.lists(numbers, min_size=1, max_size=3 * FEW),
        size=sizes,
        segment_ids=st.lists(st.sampled_from(SEGMENTS), min_size=1, max_size=2),
        is_matrix=st.booleans(),
    )
    def put_new(
        self, namespace: bytes, names: list[int], size: int, segment_ids: list[int], is_matrix: bool
    ) -> None:
        lot = [named(n, size) for n in names]
        entries = [self.entry(segment_ids[n % len(segment_ids)]) for n in range(len(lot))]
        matrix = np.frombuffer(b"".join(lot), np.uint8).reshape(-1, size)
        left = self.index.put_new(namespace, matrix if is_matrix else lot, np.array(entries, dtype=ENTRY))
        must_stay = {n for n, key in enumerate(lot) if (namespace, key) in self.model or lot.count(key) > 1}
        assert must_stay <= set(left)
        assert left == sorted(left)
        for n in set(range(len(lot))) - set(left):
            self.model[namespace, lot[n]] = entries[n]

    @rule(namespace=namespaces, key=keys, how=st.sampled_from(["any", "this", "another"]))
    def pop(self, namespace: bytes, key: bytes, how: str) -> None:
        there = self.model.get((namespace, key))
        if how == "any":
            found = self.index.pop(namespace, key)
        else:
            only = there if there and how == "this" else Entry(9, 0, 0, 0, 0)
            found = self.index.pop(namespace, key, only=only)
            if how == "another":
                there = None
        assert found == there
        if there:
            del self.model[namespace, key]

    @rule(namespace=namespaces, lot=lots)
    def use(self, namespace: bytes, lot: list[bytes]) -> None:
        lot = list(dict.fromkeys(lot))
        assert self.index.use(namespace, lot) == [self.model.get((namespace, key)) for key in lot]
        for key in lot:
            entry = self.model.get((namespace, key))
            if entry:
                self.model[namespace, key] = entry._replace(uses=min(entry.uses + 1, MAX_USES))

    @rule(data=st.data(), uses=st.integers(0, MAX_USES))
    def set_uses(self, data: st.DataObject, uses: int) -> None:
        if self.model:
            subject = data.draw(st.sampled_from(sorted(self.model)))
            self.index.set_uses(*subject, uses)
            self.model[subject] = self.model[subject]._replace(uses=uses)

    @rule(segment_id=st.sampled_from(SEGMENTS))
    def pop_segment(self, segment_id: int) -> None:
        self.index.pop_segment(segment_id)
        self.model = {name: entry for name, entry in self.model.items() if entry.segment_id != segment_id}

    @rule(namespace=namespaces, lot=lots)
    def look(self, namespace: bytes, lot: list[bytes]) -> None:
        wanted = [self.model.get((namespace, key)) for key in lot]
        assert self.index.get_many(namespace, lot) == wanted
        assert self.index.exist(namespace, lot) == bytes(
            Status.OK if entry else Status.NOT_FOUND for entry in wanted
        )

    @rule()
    def tickets(self) -> None:
        """Those of what is there name it; those of all versions that ever were name nothing else."""
        for namespace in {namespace for namespace, _ in self.model}:
            own = [key for name, key in self.model if name == namespace]
            for key, ticket in zip(own, self.index.tickets(namespace, own), strict=True):
                self.pairs[ticket, self.model[namespace, key].sequence] = (namespace, key)
        pairs = list(self.pairs)
        named = self.index.named([ticket for ticket, _ in pairs], [sequence for _, sequence in pairs])
        for (_, sequence), subject, found in zip(pairs, self.pairs.values(), named, strict=True):
            entry = self.model.get(subject)
            assert found == (subject if entry and entry.sequence == sequence else None)

    @invariant()
    def they_agree(self) -> None:
        assert len(self.index) == len(self.model)
        assert all(self.index.get(*subject) == entry for subject, entry in self.model.items())
        for segment_id in SEGMENTS:
            found: dict[tuple[bytes, bytes], Entry] = {}
            for group in self.index.segment(segment_id):
                offsets = group.entries["offset"].tolist()
                assert offsets == sorted(offsets)
                for position, key in enumerate(group.keys):
                    assert (group.namespace, key) not in found
                    found[group.namespace, key] = group.entry(position)
            here = {name: entry for name, entry in self.model.items() if entry.segment_id == segment_id}
            assert found == here


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("secret", [None, FEW_TAGS])
def test_it_grows_and_shrinks_and_grows_as_a_dictionary_does(secret):
    draw = random.Random(4)
    index, model = Index(secret), {}
    made = 0
    for _ in range(40):
        size = draw.choice([40, 40, 40, 7])
        lot = [
            draw.randrange(6000).to_bytes(4, "little").ljust(size, b"\1")
            for _ in range(draw.randrange(1, 700))
        ]
        segment_id = draw.randrange(1, 9)
        entries = []
        for _key in lot:
            made += 1
            entries.append(Entry(segment_id, made * 4096, made, made, made))
        left = set(index.put_new(NAMESPACE, lot, np.array(entries, dtype=ENTRY)))
        model |= {
            key: entry for n, (key, entry) in enumerate(zip(lot, entries, strict=True)) if n not in left
        }
        if draw.random() < 0.3:
            gone = draw.randrange(1, 9)
            index.pop_segment(gone)
            model = {key: entry for key, entry in model.items() if entry.segment_id != gone}
        for key in draw.sample(sorted(model), len(model) // 5):
            assert index.pop(NAMESPACE, key) == model.pop(key)
        assert len(index) == len(model)
        asked = lot + list(model)
        draw.shuffle(asked)
        assert index.get_many(NAMESPACE, asked) == [model.get(key) for key in asked]
    assert len(model) > 1000


def test_a_large_table_grows_a_little_at_a_time():
    index = Index()
    for start in range(0, 20_000, 500):
        entries = np.zeros(500, dtype=ENTRY)
        entries["sequence"] = np.arange(start, start + 500)
        assert (
            index.put_new(NAMESPACE, [n.to_bytes(40, "big") for n in range(start, start + 500)], entries)
            == []
        )
    found = index.get_many(NAMESPACE, [n.to_bytes(40, "big") for n in range(20_001)])
    assert [entry and entry.sequence for entry in found] == [*range(20_000), None]


@given(st.lists(st.binary(min_size=1, max_size=MAX_KEY_BYTES), unique=True, max_size=60))
def test_keys_of_any_length_are_told_apart(names):
    index = Index()
    for n, key in enumerate(names):
        index.put(NAMESPACE, key, Entry(1, 4096 * n, 0, 0, n))
    found = index.get_many(NAMESPACE, names)
    assert [entry.sequence for entry in found] == list(range(len(names)))


@given(st.binary(min_size=1, max_size=MAX_KEY_BYTES), st.integers(1, 2**32 - 1))
def test_one_key_and_many_keys_have_the_same_hash(key, namespace_id):
    table = Table(len(key), [(7**n * 0x9E3779B97F4A7C15) % 2**64 for n in range(1, MULTIPLIERS + 1)])
    assert table.put_one(namespace_id, key, Entry(1, 0, 0, 0, 0))
    packed = table.pack(namespace_id, [key])
    assert table.find(packed, table.hash(packed)).tolist() == [table.find_one(namespace_id, key)]


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([n.to_bytes(40, "little") for n in range(4096)], id="counting up"),
        pytest.param([(n << 308).to_bytes(40, "little") for n in range(4096)], id="only the last bits"),
        pytest.param(
            [((n & 63) << 314 | (n >> 6) << 58).to_bytes(40, "little") for n in range(4096)],
            id="only the highest bits of two words",
        ),
        pytest.param(
            [bytes([n >> 8]) * 20 + bytes([n & 255]) * 20 for n in range(4096)], id="repeated bytes"
        ),
    ],
)
def test_chosen_keys_do_not_share_tags(chosen):
    """Whatever the keys, the secret spreads them: of 8.4 million pairs, hardly one has the same 32 bits."""
    draw = random.Random(7)
    table = Table(40, [draw.randrange(2**64) for _ in range(MULTIPLIERS)])
    assert len(set(table.hash(table.pack(1, chosen)).tolist())) >= len(chosen) - 3


def test_every_index_has_a_secret_of_its_own():
    assert Index()._multipliers != Index()._multipliers


def test_a_namespace_without_objects_costs_nothing():
    index = Index()
    for n in range(1000):
        namespace = n.to_bytes(32, "little")
        index.put(namespace, b"key", Entry(1, 4096 * n, 0, 0, n))
        index.pop(namespace, b"key")
    assert (len(index._ids), len(index._namespaces)) == (0, 2)


def test_uses_of_what_is_not_there_cannot_be_set():
    index = Index()
    index.put(NAMESPACE, b"key", Entry(1, 0, 0, 0, 0))
    with pytest.raises(KeyError):
        index.set_uses(NAMESPACE, b"kex", 1)
    with pytest.raises(KeyError):
        index.set_uses(NAMESPACE, b"longer", 1)
    with pytest.raises(KeyError):
        index.set_uses(OTHER_NAMESPACE, b"key", 1)


def test_nothing_is_found_under_a_length_that_no_key_has():
    index = Index()
    index.put(NAMESPACE, b"key", Entry(1, 0, 0, 0, 0))
    assert index.exist(NAMESPACE, [b"longer"] * 20) == bytes([Status.NOT_FOUND]) * 20
    assert index.get_many(NAMESPACE, [b"longer"] * 20) == [None] * 20
