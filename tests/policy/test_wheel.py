"""What users install: the three packages, typed, with licence and commands, and nothing else."""

import json
from importlib.metadata import Distribution, distribution
from pathlib import PurePosixPath

import pytest

from policy.checkout import PACKAGES, ROOT, files


@pytest.fixture
def installed() -> Distribution:
    found = distribution("adp-kv")
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("an editable install has no wheel to look into; `nox -s tests` installs one")
    return found


def test_wheel_holds_the_packages_and_nothing_else(installed: Distribution) -> None:
    wanted = {str(path.relative_to(ROOT)) for path in files(*PACKAGES)}
    held = {
        str(path)
        for path in installed.files or ()
        if path.parts[0] != ".."
        and "__pycache__" not in path.parts
        and not path.parts[0].endswith(".dist-info")
    }
    assert held == wanted


def test_wheel_is_typed_licensed_and_has_its_commands(installed: Distribution) -> None:
    names = {PurePosixPath(path) for path in installed.files or ()}
    assert {PurePosixPath(package, "py.typed") for package in PACKAGES} <= names
    assert any(path.name == "LICENSE" and path.parts[0].endswith(".dist-info") for path in names)
    points = {(point.group, point.name) for point in installed.entry_points}
    assert ("console_scripts", "adp-gateway") in points
    assert installed.metadata["License-Expression"] == "Apache-2.0"
