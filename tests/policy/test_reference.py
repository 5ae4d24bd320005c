"""What the API reference is made of: docstrings, on everything that a program may use."""

import importlib
import inspect
from collections.abc import Iterator

import pytest

MODULES = (
    "adp_client",
    "adp_client.errors",
    "adp_client.protocol",
    "adp_client.testing",
    "adp_client.testing.conformance",
    "adp_client.transport",
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
