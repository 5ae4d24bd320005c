import attrs
import pytest

from adp_engines.namespace import Identity, canonical_json, diverged, weights_identity

IDENTITY = Identity(
    model={"config": "c0", "weights": [["model.safetensors", 10, "d0"]]},
    computation={"dtype": "float32", "quantization": None, "max_model_len": None},
    cache={"cache_dtype": "auto", "state_dtype": "float32"},
    blocks={"tokens_per_hash": 16, "blocks_per_chunk": 1, "groups": [["Full", {"block_size": 16}]]},
    parallel={"world_size": 1, "tensor_parallel_size": 1},
    layouts=("l0",),
    hashing={"algorithm": "sha256", "seed": "s0"},
    engine={"name": "vllm", "version": "0.29"},
)

CHANGES = {
    "weights": {"model": {"config": "c0", "weights": [["model.safetensors", 10, "d1"]]}},
    "named model": {"model": "c0"},
    "dtype": {"computation": {**IDENTITY.computation, "dtype": "bfloat16"}},
    "quantisation": {"computation": {**IDENTITY.computation, "quantization": "fp8"}},
    "cache dtype": {"cache": {**IDENTITY.cache, "cache_dtype": "fp8"}},
    "state dtype": {"cache": {**IDENTITY.cache, "state_dtype": "bfloat16"}},
    "tokens per hash": {"blocks": {**IDENTITY.blocks, "tokens_per_hash": 32}},
    "chunk": {"blocks": {**IDENTITY.blocks, "blocks_per_chunk": 2}},
    "block size": {"blocks": {**IDENTITY.blocks, "groups": [["Full", {"block_size": 32}]]}},
    "page kind": {"blocks": {**IDENTITY.blocks, "groups": [["Window", {"block_size": 16}]]}},
    "world size": {"parallel": {"world_size": 2, "tensor_parallel_size": 1}},
    "tensor parallel size": {"parallel": {"world_size": 1, "tensor_parallel_size": 2}},
    "layout": {"layouts": ("l1",)},
    "ranks": {"layouts": ("l0", "l0")},
    "hash algorithm": {"hashing": {"algorithm": "sha256_cbor", "seed": "s0"}},
    "hash seed": {"hashing": {"algorithm": "sha256", "seed": "s1"}},
    "engine version": {"engine": {"name": "vllm", "version": "0.28"}},
}


def test_fingerprint_is_stable_across_processes_and_field_order() -> None:
    again = attrs.evolve(IDENTITY, cache=dict(reversed(list(IDENTITY.cache.items()))))
    assert IDENTITY.fingerprint() == again.fingerprint()
    # A literal on purpose: a change of this value empties everybody's cache, and must be meant.
    assert IDENTITY.fingerprint().hex() == "6573bae8decf81edebd01091b9a23fdb6331da30443bb48d7887c286f3b8a003"


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_b12_any_changed_field_is_another_namespace(change) -> None:
    assert attrs.evolve(IDENTITY, **change).fingerprint() != IDENTITY.fingerprint()


def test_changes_cover_every_field() -> None:
    assert {name for change in CHANGES.values() for name in change} == {
        f.name for f in attrs.fields(Identity)
    }


def test_canonical_json_refuses_what_has_no_single_text() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))
    with pytest.raises(TypeError):
        canonical_json({1, 2})


def test_diverged_meets_nobody() -> None:
    namespace = IDENTITY.fingerprint()
    first, second = diverged(namespace), diverged(namespace)
    assert len({namespace, first, second}) == 3
    assert len(first) == len(namespace)


class TestWeights:
    @pytest.fixture
    def model(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "config.json").write_text('{"layers": 2}')
        (tmp_path / "a" / "model.safetensors").write_bytes(bytes(1_000_000))
        return tmp_path / "a"

    def test_path_does_not_count(self, model) -> None:
        before = weights_identity(model)
        assert weights_identity(model.rename(model.parent / "b")) == before

    def test_files_that_are_not_the_model_do_not_count(self, model) -> None:
        before = weights_identity(model)
        (model / "README.md").write_text("hello")
        assert weights_identity(model) == before

    @pytest.mark.parametrize("at", [0, 16383, 999_999, 500_000])
    def test_change_in_a_window_counts(self, model, at: int) -> None:
        before = weights_identity(model)
        with (model / "model.safetensors").open("r+b") as file:
            # Windows are a few tens of KB apart here: a change as wide as training makes meets one.
            file.seek(max(0, at - 50_000))
            file.write(b"\1" * 50_000)
        assert weights_identity(model) != before

    @pytest.mark.parametrize("change", ["config", "size", "name", "another file"])
    def test_everything_else_counts(self, model, change: str) -> None:
        before = weights_identity(model)
        match change:
            case "config":
                (model / "config.json").write_text('{"layers": 3}')
            case "size":
                with (model / "model.safetensors").open("ab") as file:
                    file.write(b"\0")
            case "name":
                (model / "model.safetensors").rename(model / "other.safetensors")
            case _:
                (model / "more.safetensors").write_bytes(b"")
        assert weights_identity(model) != before

    def test_no_model(self, tmp_path) -> None:
        with pytest.raises(FileNotFoundError):
            weights_identity(tmp_path)
