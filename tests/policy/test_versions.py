"""The versions that are promised are the versions that are tested."""

import tomllib

from adp_engines.vllm import _compat
from policy.checkout import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_adapter_supports_what_ci_runs() -> None:
    lines = [version.rpartition(".")[0] for version in PROJECT["tool"]["adp"]["vllm"]]
    assert lines == sorted(_compat.SUPPORTED, key=lambda line: tuple(map(int, line.split("."))))


def test_readme_names_every_version_that_is_tested() -> None:
    readme = (ROOT / "README.md").read_text()
    for version in PROJECT["tool"]["adp"]["vllm"]:
        assert version in readme
