"""Rules about the text of this repository."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.checkout import ROOT, files

TESTS = sorted(files("tests/*.py"))
SLEEPERS = {"time", "anyio", "trio", "asyncio"}
# Put together here, so that this file does not contain what it looks for.
REGISTRY_HOSTS = [f"{name}.org" for name in ("pypi", "pythonhosted", "download.pytorch", "npmjs", "anaconda")]


def sleeps(source: str) -> Iterator[tuple[int, str]]:
    """Calls that wait for a fixed time: `time.sleep(x)`, `anyio.sleep(x)`, also when imported by name.

    `sleep(0)` is a checkpoint and `sleep_forever()` waits to be cancelled; both are fine.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module in SLEEPERS
            and any(a.name == "sleep" for a in node.names)
        ):
            yield node.lineno, f"from {node.module} import sleep"
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr != "sleep"
        ):
            continue
        owner, checkpoint = (
            node.func.value,
            [arg for arg in node.args if isinstance(arg, ast.Constant) and arg.value == 0],
        )
        if isinstance(owner, ast.Name) and owner.id in SLEEPERS and not checkpoint:
            yield node.lineno, f"{owner.id}.sleep"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(0.1)", [2]),
        ("import anyio\nasync def f():\n    await anyio.sleep(delay)", [3]),
        ("from time import sleep", [1]),
        ("import trio\nasync def f():\n    await trio.sleep(0)\n    await trio.sleep_forever()", []),
    ],
)
def test_the_scan_for_sleeps_sees_what_it_should(source: str, found: list[int]) -> None:
    assert [line for line, _ in sleeps(source)] == found


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_test_sleeps(path: Path) -> None:
    # A test that waits for a fixed time is slow when the machine is fast and wrong when it is slow. Wait for
    # the condition: an event, wait_all_tasks_blocked, a virtual clock, a line of a process's output.
    assert list(sleeps(path.read_text())) == []


def test_no_registry_host_is_named() -> None:
    # Where packages come from is the user's setting (a mirror, a wheel folder); naming a host overrides it.
    naming = {
        f"{path.relative_to(ROOT)}: {host}"
        for path in files()
        for host in REGISTRY_HOSTS
        if host.encode() in path.read_bytes()
    }
    assert naming == set()
