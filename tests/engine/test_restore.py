"""The main job on real vLLM: an engine is killed, started again, and its prompts come back from the gateway.

One model for each kind of cache: all layers attend to everything; some to a window; some carry a recurrent
state.
"""

from pathlib import Path
from typing import Any

import attrs
import pytest

from .processes import prompt

PROMPTS = [prompt(seed) for seed in (1, 2, 3)]
SHARED_MEMORY = Path("/dev/shm")
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": {},
    "recurrent": {"mamba_ssm_cache_dtype": "float32"},
}


@attrs.frozen(kw_only=True)
class Story:
    """What happened to one model."""

    groups: list[list[Any]]
    without_adp: list[dict[str, Any]]
    first: list[dict[str, Any]]
    stored: dict[str, int]
    restored: list[dict[str, Any]]
    loaded: dict[str, int]
    again: list[dict[str, Any]]
    loaded_again: dict[str, int]
    namespaces: tuple[str, str]
    left_behind: set[Path]


@pytest.fixture(scope="module", params=KINDS)
def story(request, model, gateway, start_engine) -> Story:
    settings = KINDS[request.param]
    path = model(request.param)
    if gateway._process is None:
        gateway.start()
    adp = {"endpoint": gateway.endpoint, "staging_bytes": 64 << 20, "store_staging_bytes": 16 << 20}

    plain = start_engine(path, adp=None, **settings)
    without_adp = plain.generate(*PROMPTS)
    plain.kill()

    shared_before = set(SHARED_MEMORY.iterdir())
    one = start_engine(path, adp=adp, **settings)
    first = one.generate(*PROMPTS)
    one.do("settle")
    stored, namespace = one.do("counters"), one.do("namespace")
    one.kill()
    left_behind = set(SHARED_MEMORY.iterdir()) - shared_before

    two = start_engine(path, adp=adp, **settings)
    restored = two.generate(*PROMPTS)
    loaded = two.do("counters")
    two.do("forget_local")
    again = two.generate(*PROMPTS)
    loaded_again = two.do("counters")
    namespaces = (namespace, two.do("namespace"))
    two.do("shutdown")
    return Story(
        groups=two.groups,
        without_adp=without_adp,
        first=first,
        stored=stored,
        restored=restored,
        loaded=loaded,
        again=again,
        loaded_again=loaded_again,
        namespaces=namespaces,
        left_behind=left_behind,
    )


def said(outputs: list[dict[str, Any]]) -> list[tuple[list[int], list[float]]]:
    return [(output["tokens"], output["logprobs"]) for output in outputs]


def test_storing_changes_no_output(story: Story) -> None:
    assert said(story.first) == said(story.without_adp)
    assert [output["cached"] for output in story.first] == [0, 0, 0]


def test_every_prompt_comes_back(story: Story) -> None:
    whole_blocks = [
        900 // max(size for _, size, _ in story.groups) * max(size for _, size, _ in story.groups)
    ] * 3
    assert [output["cached"] for output in story.restored] == whole_blocks


def test_restored_prompts_say_the_same_to_the_last_bit(story: Story) -> None:
    assert said(story.restored) == said(story.without_adp)


def test_everything_computed_was_stored_and_nothing_failed(story: Story) -> None:
    assert story.stored["objects_stored"] > 0
    for name in ("stores_refused", "stores_failed", "stores_shed", "stores_partial", "stores_disconnected"):
        assert story.stored[name] == 0, name
    assert story.loaded["loads_failed"] == story.loaded["loads_unverified"] == 0


def test_restored_prompts_are_not_stored_again(story: Story) -> None:
    assert story.loaded["objects_stored"] == 0


def test_window_and_state_groups_fetch_only_what_a_hit_needs(story: Story) -> None:
    """A hit needs all chunks of full attention, and of other groups one window or one state a prompt."""
    full = sum(900 // size for kind, size, _ in story.groups if kind.startswith("Full")) * 3
    others = sum(not kind.startswith("Full") for kind, _, _ in story.groups) * 3
    assert story.loaded["objects_loaded"] == full + others


def test_staged_bytes_serve_a_second_restore_without_the_network(story: Story) -> None:
    assert [output["cached"] for output in story.again] == [output["cached"] for output in story.restored]
    assert said(story.again) == said(story.without_adp)
    assert story.loaded_again["chunks_fetched"] == story.loaded["chunks_fetched"]
    assert story.loaded_again["objects_loaded"] == 2 * story.loaded["objects_loaded"]


def test_namespace_is_the_same_after_a_restart(story: Story) -> None:
    assert len(set(story.namespaces)) == 1


def test_b55_killed_engine_leaves_nothing_in_shared_memory(story: Story) -> None:
    assert not {path.name for path in story.left_behind if "adp" in path.name}
