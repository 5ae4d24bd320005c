"""Models with weights, a gateway, and engines that are dead when a test module ends, whatever happened."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .processes import Engine, Gateway

MODELS = Path(__file__).parent / "models"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(900))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the model of that name (`models/NAME.json`) with weights that expose a wrong cache."""
    folder = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        from demo.weights import write_model

        return write_model(MODELS / f"{name}.json", folder / name, seed=1)

    return write


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway") / "kv")
    yield gateway
    gateway.kill()


@pytest.fixture(scope="module")
def start_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    started: list[Engine] = []
    logs = tmp_path_factory.mktemp("engines")

    def start(model: Path, **options: Any) -> Engine:
        engine = Engine(model, logs / f"{len(started)}.log", **options)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        engine.kill()
