"""The command line of the gateway contract, without a process."""

import json
import socket
import threading
from pathlib import Path

import pytest

from adp_client.testing.conformance import GATEWAY_CLAUSES, Report, Result, Verdict
from adp_client.testing.conformance.__main__ import main, row, to_json
from adp_client.transport import TCPEndpoint


def test_the_list_has_every_clause(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [clause.id for clause in GATEWAY_CLAUSES]
    assert all(line.endswith(clause.statement) for line, clause in zip(lines, GATEWAY_CLAUSES, strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "an ENDPOINT is needed"),
        (["carrier-pigeon://"], "carrier-pigeon"),
        (["tcp://127.0.0.1:1", "--only", "5.99-none"], "no such clause: 5.99-none"),
        (["tcp://127.0.0.1:1", "--token-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["tcp://127.0.0.1:1", "--tls-ca", "ca.pem"], "is for endpoints tls://HOST:PORT"),
        (["tls://127.0.0.1:1", "--tls-key", "key.pem"], "go together"),
        (["tcp://127.0.0.1:1", "--timeout", "0"], "not a number of seconds"),
        (["tcp://127.0.0.1:1", "--timeout", "soon"], "not a number of seconds"),
        (["tcp://127.0.0.1:1", "--level", "frame"], "--level"),
    ],
)
def test_bad_usage_is_told_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert words in capsys.readouterr().err


def test_nobody_there_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"unix://{tmp_path}/nobody"]) == 2
    assert capsys.readouterr().err.startswith(f"no gateway at unix://{tmp_path}/nobody: ")


def test_another_service_is_no_gateway(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"220 mail.test ESMTP\r\n" + bytes(32))

        thread = threading.Thread(target=serve)
        thread.start()
        status = main([f"tcp://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "10"])
        thread.join()
    assert status == 2
    assert "BAD_MAGIC" in capsys.readouterr().err


def test_a_row_says_what_went_wrong_and_what_was_promised() -> None:
    kept = Result(id="5.4-exact", section="5.4", statement="It is so.", verdict=Verdict.PASSED)
    broken = Result(
        id="5.4-empty",
        section="5.4",
        statement="It is so.",
        verdict=Verdict.FAILED,
        sentence="READ: expected so, got otherwise",
    )
    skipped = Result(
        id="8-token", section="8", statement="It is so.", verdict=Verdict.SKIPPED, sentence="no token"
    )
    assert row(kept).split() == ["5.4-exact", "5.4", "pass"]
    first, *rest = row(broken).splitlines()
    assert first.split() == ["5.4-empty", "5.4", "fail"]
    assert [line.strip() for line in rest] == ["It is so.", "READ: expected so, got otherwise"]
    assert row(skipped).split(maxsplit=3) == ["8-token", "8", "skip", "no token"]
    report = Report(results=(kept, broken, skipped))
    assert not report.is_kept
    assert str(report) == "1 pass, 1 fail, 1 skip\n5.4-empty: READ: expected so, got otherwise"
    told = json.loads(to_json(report, TCPEndpoint(host="h", port=1)))
    assert told["endpoint"] == "tcp://h:1"
    assert told["is_kept"] is False
    assert [clause["verdict"] for clause in told["clauses"]] == ["pass", "fail", "skip"]
