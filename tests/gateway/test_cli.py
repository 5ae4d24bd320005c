"""The command line, without a process."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from adp_client.transport import parse_endpoint
from adp_client.transport.trust import server_context
from adp_gateway.cli import main
from adp_gateway.cli.serve import warn_of_open_doors
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.logs import JsonFormatter
from adp_gateway.sizes import size_of
from certificates import Authority, contexts

MIB = 1 << 20


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """`serve` sets up the log of its process, which here is everybody's."""
    logger = logging.getLogger("adp_gateway")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("100GiB", 100 << 30),
        ("2T", 2 << 40),
        ("512 MiB", 512 * MIB),
        ("7mb", 7 * MIB),
        ("9B", 9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5GiB", "1PiB", "1 000", "0x10", "٣", "1GiBB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        size_of(text)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "argument --data: required, and missing"),
        (["--data", "x", "--capacity", "much"], "argument --capacity: 'much' is not a size"),
        (["--data", "x", "--capacity", "1KiB"], "argument --capacity: must be between"),
        (["--data", "x", "--listen", "7171"], "argument --listen: '7171' is none of"),
        (["--data", "x", "--listen", "tcp://localhost:99999"], "argument --listen: "),
        (["--data", "x", "--listen", "unix://relative"], "argument --listen: "),
        (["--data", "x", "--token-file", "/nonexistent"], "argument --token-file: cannot read"),
        (["--data", "x", "--token-file", "/dev/null"], "argument --token-file: '/dev/null' must hold"),
        (["--data", "x", "--durability", "maybe"], "argument --durability: invalid choice"),
        (["--data", "x", "--max-command", "1000"], "argument --max-command: must be between"),
        (["--data", "x", "--max-object", "0"], "argument --max-object: must be between"),
        (["--data", "x", "--io-threads", "0"], "argument --io-threads: must be between"),
        (["--data", "x", "--io-threads", "many"], "argument --io-threads: invalid int value"),
        (["--data", "x", "--max-connections", "0"], "argument --max-connections: must be between"),
        (["--data", "x", "--grace", "-1"], "argument --grace: must be"),
        (["--data", "x", "--grace", "nan"], "argument --grace: expected a number"),
        (["--data", "x", "--colour"], "unrecognized arguments: --colour"),
        (["--data", "x", "--tls-certificate", "c.pem"], "--tls-certificate and --tls-key go together"),
        (["--data", "x", "--tls-client-ca", "c.pem"], "--tls-certificate and --tls-key go together"),
        (["--data", "x", "--listen", "tls://h:1"], "a certificate and its key, go together"),
        (
            ["--data", "x", "--tls-certificate", "/nonexistent", "--tls-key", "/dev/null"],
            "--tls-certificate: cannot read '/nonexistent': No such file or directory",
        ),
        (
            ["--data", "x", "--tls-certificate", "/dev/null", "--tls-key", "/dev/null"],
            "--tls-certificate: '/dev/null' and '/dev/null' are not a certificate and its key in PEM form",
        ),
        (
            ["--data", "x", "--listen", "tcp://0.0.0.0:7171"],
            "argument --listen: everybody who reaches tcp://0.0",
        ),
        (["--data", "x", "--listen", "tcp://[::]:7171"], "or say --insecure-no-token"),
        (["--data", "x", "--listen", "tcp://127.example.org:7171"], "or say --insecure-no-token"),
        (["--data", "x", "--tenants", "/nonexistent"], "argument --tenants: cannot read '/nonexistent'"),
        (["--data", "x", "--tenants", "/dev/null"], "argument --tenants: required, and missing @ $.tenants"),
        (["--data", "/" + "long/" * 30], "--data is too long for the default --listen"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_option(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", *options])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("adp-gateway")
    assert problem in said.err


def test_every_problem_of_a_tenants_file_is_in_the_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text('[tenants.a]\nquota = "much"\n[tenants.b]\ntoken = "s3cret"\n')
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--data", "x", "--tenants", str(file)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    for problem in ("'much' is not a size", "@ $.tenants['a'].quota", "unknown key", "$.tenants['b'].token"):
        assert problem in line
    assert "s3cret" not in line


def test_tenants_or_a_token_for_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "tenants.toml").write_text('[tenants.a]\ntoken_file = "token"\n')
    both = ["--token-file", str(tmp_path / "token"), "--tenants", str(tmp_path / "tenants.toml")]
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--data", "x", *both])
    assert caught.value.code == 2
    assert "not allowed with argument --token-file" in capsys.readouterr().err


def test_a_directory_of_somebody_else_s_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    assert main(["serve", "--data", str(tmp_path), "--listen", f"unix://{tmp_path}/s"]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds no store, but is not empty ('thesis.txt' is there)" in line
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_data_directory_that_cannot_be_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert main(["serve", "--data", str(file / "kv"), "--listen", f"unix://{tmp_path}/s"]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_help_documents_the_exit_statuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("exit status", "130", "143", "ready ENDPOINT", "--token-file"):
        assert word in text


def test_json_lines() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        record = logging.LogRecord(
            "adp_gateway.x", logging.ERROR, "f", 1, "it %s", ("broke",), sys.exc_info()
        )
    record.data = {"objects": 3}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "it broke"
    assert fields["level"] == "error"
    assert fields["objects"] == 3
    assert "RuntimeError: boom" in fields["exception"]


def test_a_certificate_without_an_endpoint_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Authority(tmp_path).issue("localhost")
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--data", "x", "--tls-certificate", files.certificate, "--tls-key", files.key])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--listen tls://HOST:PORT, and --tls-certificate and --tls-key" in said


@pytest.mark.parametrize(
    ("listen", "token", "is_mutual", "warning"),
    [
        ("tcp://127.0.0.1:1", None, False, None),
        ("tcp://0.0.0.0:1", None, False, "open to everyone"),
        ("tcp://0.0.0.0:1", b"token", False, "in the clear"),
        ("tls://0.0.0.0:1", None, False, "open to everyone"),
        ("tls://0.0.0.0:1", b"token", False, None),
        ("tls://0.0.0.0:1", None, True, None),
    ],
)
def test_warnings_of_open_doors(
    listen: str,
    token: bytes | None,
    is_mutual: bool,
    warning: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tls = contexts()[0] if listen.startswith("tls") else None
    if is_mutual:
        authority = Authority(tmp_path)
        files = authority.issue("localhost")
        tls = server_context(
            certificate_file=files.certificate, key_file=files.key, client_ca_file=authority.file
        )
    config = GatewayConfig(
        store=StoreConfig(directory=tmp_path), listen=(parse_endpoint(listen),), token=token, tls=tls
    )
    warn_of_open_doors(config)
    assert [warning in line for line in caplog.messages] == [True] * (warning is not None)
