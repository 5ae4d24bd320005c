"""What the API reference is made of: docstrings, on everything that a program may use."""

import importlib
import inspect
from collections.abc import Iterator

import pytest

from adp_client import Client

MODULES = (
    "adp_client",
    "adp_client.errors",
    "adp_client.protocol",
    "adp_client.testing",
    "adp_client.transport",
)
VERBS = sorted(
    name
    for name, member in vars(Client).items()
    if inspect.iscoroutinefunction(member) and not name.startswith("_")
)


def public_names(module: str) -> Iterator[tuple[str, object]]:
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")])
    for name in names:
        member = getattr(found, name)
        if not (inspect.isclass(member) or inspect.isfunction(member)):
            continue
        yield f"{module}.{name}", member
        if inspect.isclass(member):
            for part, value in vars(member).items():
                if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    yield f"{module}.{name}.{part}", value


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_docstring(module: str) -> None:
    silent = [name for name, member in public_names(module) if not inspect.getdoc(member)]
    assert silent == []


def test_there_are_verbs() -> None:
    assert {"exist", "read", "write", "delete", "check", "fence", "ping"} <= set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_raises_and_what_cancellation_leaves(verb: str) -> None:
    text = inspect.getdoc(getattr(Client, verb)) or ""
    assert "Raises" in text
    assert "ancel" in text
