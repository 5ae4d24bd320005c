"""The front doors: `__all__` of the public packages tells the truth."""

import importlib
import pkgutil
from types import ModuleType

import pytest

from policy.checkout import PACKAGES


def modules() -> list[str]:
    """Every module of the packages that needs neither torch nor an engine to be imported."""
    found = []
    for package in PACKAGES:
        found.append(package)
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not info.name.startswith("adp_engines.") and not info.name.endswith("__main__"):
                found.append(info.name)
    return found


@pytest.mark.parametrize("name", modules())
def test_all_lists_names_that_exist_once_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert [each for each in exported if not hasattr(module, each)] == []
    assert len(set(exported)) == len(exported)


def public_names(module: ModuleType) -> set[str]:
    """What a package offers to somebody who looks inside: not private, not a module."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_it_binds(package: str) -> None:
    module = importlib.import_module(package)
    assert public_names(module) == set(getattr(module, "__all__", ()))


def test_exported_names_are_documented() -> None:
    client = importlib.import_module("adp_client")
    for name in client.__all__:
        assert getattr(client, name).__doc__, f"adp_client.{name} has no docstring"
