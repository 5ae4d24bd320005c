"""The tutorial's programs do what the tutorial says, against a real gateway that is stopped in between."""

import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from demo.processes import run_gateway

PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "first-restore.md").read_text()
STORE, RESTORE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(RESTORE_PRINTS,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
ENDPOINT = "tcp://127.0.0.1:7171"


async def output_of(program: str, endpoint: str) -> str:
    assert ENDPOINT in program
    process = await anyio.run_process(
        [sys.executable, "-W", "error", "-c", program.replace(ENDPOINT, endpoint)], stderr=subprocess.PIPE
    )
    assert process.stderr == b""
    return process.stdout.decode()


@pytest.mark.anyio
async def test_pages_stored_by_one_program_are_restored_by_another_after_a_restart(tmp_path: Path) -> None:
    data, log = tmp_path / "kv", tmp_path / "gateway.log"
    async with run_gateway(data=data, endpoint="tcp://127.0.0.1:0", log=log) as endpoint:
        assert await output_of(STORE, endpoint) == "stored: 2\n"
    async with run_gateway(data=data, endpoint="tcp://127.0.0.1:0", log=log) as endpoint:
        assert await output_of(RESTORE, endpoint) == RESTORE_PRINTS
        elsewhere = RESTORE.replace("my model", "another model")
        assert (await output_of(elsewhere, endpoint)).startswith("leading blocks found: 0\n")


def test_the_gateway_listens_where_the_tutorial_says() -> None:
    text = subprocess.run(
        [str(Path(sys.executable).with_name("adp-gateway")), "serve", "--help"],
        capture_output=True,
        text=True,
    ).stdout
    assert ENDPOINT in text
    assert "gateway.sock" in text
