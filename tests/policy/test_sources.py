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
    """Calls that wait for a fixed time and hope.

    Fine are: `sleep(0)`, a checkpoint; `sleep_forever()`, which waits to be cancelled; a `while` loop that
    asks another process until it says yes; and a virtual clock, on which sleeping takes no time.
    """
    tree = ast.parse(source)
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.While)]
    polling = {id(node) for loop in loops for node in ast.walk(loop)}
    has_virtual_clock = "autojump_threshold" in source or "@on_a_jumping_clock" in source
    clocks = {"time"} if has_virtual_clock else SLEEPERS
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in SLEEPERS:
            if any(alias.name == "sleep" for alias in node.names):
                yield node.lineno, f"from {node.module} import sleep"
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "sleep"
        ):
            owner = node.func.value
            is_checkpoint = any(isinstance(each, ast.Constant) and each.value == 0 for each in node.args)
            if (
                isinstance(owner, ast.Name)
                and owner.id in clocks
                and not is_checkpoint
                and id(node) not in polling
            ):
                yield node.lineno, f"{owner.id}.sleep"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\ntime.sleep(0.1)", [2]),
        ("import anyio\nasync def f():\n    await anyio.sleep(delay)", [3]),
        ("from time import sleep", [1]),
        ("import trio\nasync def f():\n    await trio.sleep(0)\n    await trio.sleep_forever()", []),
        ("import time\nwhile not ready():\n    time.sleep(0.05)\ntime.sleep(1)", [4]),
        ("clock = MockClock(autojump_threshold=0)\nasync def f():\n    await anyio.sleep(3600)", []),
        ("clock = MockClock(autojump_threshold=0)\ntime.sleep(1)", [2]),
        ("@on_a_jumping_clock\nasync def f():\n    await anyio.sleep(3600)", []),
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
