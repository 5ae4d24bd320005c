import pytest

from adp_engines.errors import UnknownLayout
from adp_engines.geometry import Geometry, LayerRef, Moves, Run, Tensor, plan_load, plan_store


def tensor(row: int = 64, *, blocks: int = 10, stride: int | None = None) -> Tensor:
    return Tensor(blocks=blocks, row_bytes=row, stride_bytes=stride or row)


def geometry(tensors, refs, *, blocks_per_chunk=1, names=None) -> Geometry:
    names = names or [[f"{g}.{i}" for i in range(len(group))] for g, group in enumerate(refs)]
    return Geometry.from_description(tensors, refs, blocks_per_chunk=blocks_per_chunk, layer_names=names)


def ref(index: int, page: int = 64) -> LayerRef:
    return LayerRef(tensor=index, page_bytes=page)


def test_runs_are_contiguous_and_cover_the_object() -> None:
    laid = geometry([tensor(64), tensor(40)], [[ref(0, 50), ref(1, 40)], [ref(1, 8)]], blocks_per_chunk=3)
    assert laid.groups[0].runs == (
        Run(tensor=0, page_bytes=50, offset=0),
        Run(tensor=1, page_bytes=40, offset=150),
    )
    assert laid.object_bytes == (270, 24)


def test_packed_group_needs_one_ref_for_all_its_layers() -> None:
    laid = geometry([tensor(256)], [[ref(0, 256)]], names=[["a", "b", "c"]])
    assert laid.object_bytes == (256,)


@pytest.mark.parametrize(
    ("tensors", "refs", "names", "line"),
    [
        ([], [], [], "the engine has no KV cache to store"),
        ([tensor(), tensor(blocks=9)], [[ref(0), ref(1)]], [["a", "b"]], "cache tensor 1 has 9 blocks"),
        ([tensor(64, stride=32)], [[ref(0)]], [["a"]], "cache tensor 0 is not block first"),
        (
            [tensor(), tensor(), tensor()],
            [[ref(0), ref(1)]],
            [["a", "b", "c"]],
            "layer 'c' of KV cache group 0",
        ),
        ([tensor()], [[ref(0)], []], [["a"], []], "KV cache group 1 has no tensors"),
        ([tensor()], [[ref(1)]], [["a"]], "layer 'a' of group 0 refers to unknown tensor 1"),
        ([tensor(64)], [[ref(0, 65)]], [["a"]], "layer 'a' of group 0: pages of 65 bytes in rows of 64"),
        ([tensor(), tensor()], [[ref(0)]], [["a"]], "cache tensor 1 belongs to no KV cache group"),
        ([tensor()], [[ref(0)]], [["a"], ["b"]], "2 KV cache groups, but tensors for 1"),
    ],
)
def test_b06_what_has_no_home_stops_the_start_by_name(tensors, refs, names, line) -> None:
    with pytest.raises(UnknownLayout) as refused:
        geometry(tensors, refs, names=names)
    assert str(refused.value).startswith(f"adp: {line}")
    assert refused.value.code == 2


def test_digest_tells_layouts_apart_but_not_cache_sizes() -> None:
    base = geometry([tensor(), tensor()], [[ref(0), ref(1)]])
    larger = geometry([tensor(blocks=99), tensor(blocks=99)], [[ref(0), ref(1)]])
    padded = geometry([tensor(stride=128), tensor()], [[ref(0), ref(1)]])
    assert base.digest("x") == larger.digest("x") == padded.digest("x")
    others = [
        geometry([tensor(), tensor()], [[ref(0, 32), ref(1)]]).digest("x"),
        geometry([tensor(), tensor()], [[ref(0), ref(1, 32)]]).digest("x"),
        geometry([tensor(), tensor()], [[ref(0)], [ref(1)]]).digest("x"),
        geometry([tensor(), tensor()], [[ref(0), ref(1)]], blocks_per_chunk=2).digest("x"),
        base.digest("y"),
    ]
    assert len({base.digest("x"), *others}) == 6


class TestPlanStore:
    def test_blocks_fill_their_objects_in_order(self) -> None:
        moves, refused = plan_store(2, [4, 2], [5, 6, 7, 8, 3, 4], [0, 0, 1])
        assert moves == [
            Moves(group=0, blocks=(5, 6, 7, 8), objects=(0, 0, 1, 1), places=(0, 1, 0, 1)),
            Moves(group=1, blocks=(3, 4), objects=(2, 2), places=(0, 1)),
        ]
        assert refused == ()

    @pytest.mark.parametrize(
        ("sizes", "blocks"),
        [([3, 2], [5, 6, 7, 3, 4]), ([5, 2], [5, 6, 7, 8, 9, 3, 4]), ([4, 2], [5, 6, 0, 8, 3, 4])],
        ids=["a hole", "one too many", "placeholder"],
    )
    def test_group_that_is_not_made_of_whole_chunks_is_not_stored(self, sizes, blocks) -> None:
        moves, refused = plan_store(2, sizes, blocks, [0, 0, 1])
        assert [m.group for m in moves] == [1]
        assert moves[0].blocks == (3, 4)
        assert refused == (0, 1)

    def test_group_without_keys_is_skipped(self) -> None:
        moves, refused = plan_store(1, [0, 2, 0], [8, 9], [1, 1])
        assert [(m.group, m.blocks, m.objects) for m in moves] == [(1, (8, 9), (0, 1))]
        assert refused == ()


class TestPlanLoad:
    def test_b03_local_part_of_a_chunk_is_left_alone(self) -> None:
        """The local hit ends two blocks into a chunk of four: only the other two are written."""
        assert plan_load(4, [2], [10], [70, 71], [0]) == [
            Moves(group=0, blocks=(70, 71), objects=(0, 0), places=(2, 3))
        ]

    def test_run_that_crosses_chunks(self) -> None:
        (moves,) = plan_load(4, [6], [3], [1, 2, 3, 4, 5, 6], [0, 0, 0])
        assert moves.objects == (0, 1, 1, 1, 1, 2)
        assert moves.places == (3, 0, 1, 2, 3, 0)

    def test_placeholder_blocks_are_never_written(self) -> None:
        assert plan_load(1, [3], [0], [0, 0, 9], [0, 0, 0]) == [
            Moves(group=0, blocks=(9,), objects=(2,), places=(0,))
        ]

    def test_objects_are_counted_across_groups(self) -> None:
        moves = plan_load(1, [2, 1], [0, 7], [4, 5, 6], [0, 0, 1])
        assert [(m.group, m.objects) for m in moves] == [(0, (0, 1)), (1, (2,))]

    @pytest.mark.parametrize(
        ("sizes", "first", "blocks", "groups"),
        [
            ([2], [0], [4, 5], [0]),
            ([2], [0], [4, 5], [0, 0, 0]),
            ([1, 1], [0, 0], [4, 5], [0, 0]),
            ([2], [0], [4, 4], [0, 0]),
            ([1, 1], [0, 0], [4, 4], [0, 1]),
            ([1], [0], [4, 5], [0]),
        ],
        ids=[
            "key missing",
            "key too many",
            "wrong group",
            "block twice",
            "block in two groups",
            "block too many",
        ],
    )
    def test_b01_job_that_does_not_add_up_touches_nothing(self, sizes, first, blocks, groups) -> None:
        assert plan_load(1, sizes, first, blocks, groups) is None
