"""The contract, from the command line, on the real process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from certificates import Authority

from .process import running

TOKEN = "a token of some length"


def conformance(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "adp_client.testing.conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.timeout(120)
def test_the_gateway_process_keeps_the_contract(tmp_path: Path) -> None:
    token, results = tmp_path / "token", tmp_path / "results.json"
    token.write_text(f"{TOKEN}\n")
    data, listen = tmp_path / "data", ("tcp://127.0.0.1:0",)
    with running(data, "--token-file", str(token), listen=listen) as served:
        (endpoint,) = served.endpoints
        told = conformance(endpoint, "--token-file", str(token), "--json", str(results), "--timeout", "60")
        assert told.returncode == 0, told.stdout + told.stderr
        status, log = served.stop()
    assert status == 0
    assert "Traceback" not in log
    assert TOKEN not in log + told.stdout
    found = json.loads(results.read_text())
    assert found["endpoint"] == endpoint
    assert found["is_kept"] is True
    verdicts = [clause["verdict"] for clause in found["clauses"]]
    assert verdicts.count("pass") > 80
    assert verdicts.count("fail") == 0
    lines = told.stdout.splitlines()
    assert len(lines) == len(verdicts) + 1
    assert (
        lines[-1]
        == f"{endpoint}: {verdicts.count('pass')} kept, 0 not kept, {verdicts.count('skip')} skipped"
    )


@pytest.mark.timeout(120)
def test_the_gateway_process_is_at_level_full_on_a_unix_socket(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    with running(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served:
        (endpoint,) = served.endpoints
        told = conformance(endpoint, "--level", "full", "--json", str(results), "--timeout", "60")
        assert told.returncode == 0, told.stdout + told.stderr
        status, log = served.stop()
    assert status == 0
    assert "Traceback" not in log
    verdicts = {each["id"]: each["verdict"] for each in json.loads(results.read_text())["clauses"]}
    assert {each for each, verdict in verdicts.items() if verdict == "skip"} == {
        "4.4-no-fragments",
        "4.5-workers",
        "8-token",
    }
    assert sum(each.startswith("5.14-") for each in verdicts) > 15


def test_one_clause_without_the_token_is_no_gateway(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    listen = (f"unix://{tmp_path}/s",)
    with running(tmp_path / "data", "--token-file", str(token), listen=listen) as served:
        (endpoint,) = served.endpoints
        told = conformance(endpoint, "--only", "5.10-ping")
        assert told.returncode == 2
        assert told.stderr.startswith(f"no gateway at {endpoint}: ")
        assert "UNAUTHENTICATED" in told.stderr
        told = conformance(endpoint, "--token-file", str(token), "--only", "5.10-ping")
        assert told.returncode == 0
        assert [line.split() for line in told.stdout.splitlines()[:1]] == [["5.10-ping", "5.10", "pass"]]


@pytest.mark.timeout(120)
def test_the_contract_inside_tls(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    folder.mkdir()
    authority = Authority(folder)
    files = authority.issue("127.0.0.1")
    extra = ("--tls-certificate", files.certificate, "--tls-key", files.key)
    with running(tmp_path / "data", *extra, listen=("tls://127.0.0.1:0",)) as served:
        (endpoint,) = served.endpoints
        told = conformance(endpoint, "--tls-ca", authority.file, "--timeout", "60")
        assert told.returncode == 0, told.stdout + told.stderr
        told = conformance(endpoint)
        assert told.returncode == 2
        assert told.stderr.startswith(f"no gateway at {endpoint}: ")
        assert "Traceback" not in served.log.read_text()
