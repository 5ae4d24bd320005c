"""The README's two commands are the way in, for people and for CI."""

import re
import shlex

from policy.checkout import ROOT

COMMANDS = [
    block.strip()
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    if "-m venv" in block
]
SESSIONS = re.findall(r"nox(?: -s ([\w ]+))?$", "\n".join(COMMANDS), flags=re.MULTILINE)


def test_readme_has_exactly_two_setup_commands_each_with_its_own_environment() -> None:
    assert SESSIONS == ["demo", ""]
    environments = [shlex.split(command)[3] for command in COMMANDS]
    assert len(set(environments)) == 2
    for command, environment in zip(COMMANDS, environments, strict=True):
        assert command.startswith(f"python3.11 -m venv {environment} && ")
        assert "\n" not in command


def test_ci_runs_the_test_command_and_nothing_less() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    lines = [line for line in script.splitlines() if line and not line.startswith("#")]
    *preparation, last = lines
    assert last == COMMANDS[1]
    assert preparation == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."', "export CI=true"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_plain_nox_covers_every_promise() -> None:
    selected = re.search(
        r"nox\.options\.sessions = \[(.*?)\]", (ROOT / "noxfile.py").read_text(), flags=re.DOTALL
    )
    assert selected is not None
    assert {"lint", "types", "imports", "tests", "vectors", "vllm", "demo"} <= set(
        re.findall(r'"([\w-]+)"', selected[1])
    )
