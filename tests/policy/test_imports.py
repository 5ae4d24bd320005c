"""The import contracts hold, and would notice if they did not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from policy.checkout import PACKAGES, ROOT


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    # The installed packages must not be found before the copy: the copy's folder goes first on the path.
    program = "from importlinter.cli import lint_imports_command as main; main()"
    command = [sys.executable, "-c", program, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The packages and their contracts, free to be spoiled."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_hold(copy: Path) -> None:
    result = lint_imports(copy)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("adp_client/protocol/keys.py", "import time"),
        ("adp_client/protocol/messages.py", "import anyio"),
        ("adp_client/protocol/frames.py", "from random import random"),
        ("adp_client/__init__.py", "import adp_gateway"),
        ("adp_gateway/__init__.py", "import adp_engines"),
        ("adp_gateway/session.py", "from adp_client.client import Client"),
        ("adp_gateway/store/index.py", "from adp_client.protocol import keys"),
        ("adp_gateway/device/base.py", "import socket"),
        ("adp_engines/geometry.py", "import torch"),
        ("adp_engines/catalogue.py", "import vllm"),
    ],
)
def test_a_planted_violation_is_found(copy: Path, module: str, line: str) -> None:
    path = copy / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout
