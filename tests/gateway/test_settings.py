"""`serve --config FILE`: the flags by other means, and every mistake told at once with where it is."""

import json
from pathlib import Path

import attrs
import pytest

from adp_client.protocol.errors import ConfigError
from adp_client.transport import TCPEndpoint, UnixEndpoint
from adp_gateway.cli import main
from adp_gateway.cli.serve import gateway_config
from adp_gateway.cli.settings import ServeSettings, admin_endpoint, flag_of, load_settings

MIB = 1 << 20

WHOLE = """
data = "kv"
listen = ["tcp://127.0.0.1:0", "unix:///tmp/adp.sock"]
admin = "127.0.0.1:0"
capacity = "64MiB"
segment = 16777216
token_file = "token"
durability = "durable"
max_object = "8MiB"
max_command = "128KiB"
io_threads = 2
incoming_memory = "64MiB"
max_connections = 10
grace = 3
log_format = "json"
"""


def load(tmp_path: Path, text: str, **flags: object) -> ServeSettings:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    return load_settings(flags, file)


def problems(tmp_path: Path, text: str, **flags: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        gateway_config(load(tmp_path, text, **flags))
    return caught.value.problems


def test_every_option_can_stand_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    config, files = gateway_config(load(tmp_path, WHOLE))
    assert config.store.directory == tmp_path / "kv", "paths begin where the file is"
    assert files == (tmp_path / "token",)
    assert config.listen == (TCPEndpoint(host="127.0.0.1", port=0), UnixEndpoint(path="/tmp/adp.sock"))
    assert config.admin == TCPEndpoint(host="127.0.0.1", port=0)
    assert (config.store.capacity_bytes, config.store.segment_bytes) == (64 * MIB, 16 * MIB)
    assert (config.store.max_object_bytes, config.store.max_command_bytes) == (8 * MIB, MIB // 8)
    assert (config.store.durability, config.store.io_threads) == ("durable", 2)
    assert (config.incoming_bytes, config.max_sessions, config.grace_seconds) == (64 * MIB, 10, 3.0)
    assert config.token == b"s3cret"


def test_flags_win(tmp_path: Path) -> None:
    settings = load(tmp_path, WHOLE, io_threads=9, data="/elsewhere", capacity="1GiB")
    assert (settings.io_threads, settings.data, settings.capacity) == (9, "/elsewhere", "1GiB")
    assert settings.grace == 3.0


def test_flags_and_file_name_every_option_alike() -> None:
    assert flag_of("max_object") == "--max-object"
    names = [field.name for field in attrs.fields(ServeSettings)]
    assert "config" not in names
    assert all(field.metadata["help"] for field in attrs.fields(ServeSettings))


def test_b53_all_problems_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = """
        max_objekt = "8MiB"
        io_threads = "4"
        capacity = "much"
        insecure_no_token = "false"
        listen = "tcp://h"
        grace = true
        max_connections = 0
        durability = "maybe"
        admin = "7172"
    """
    file = tmp_path / "gateway.toml"
    found = problems(tmp_path, text)
    assert len(found) == 10
    for key, words in {
        "max_objekt": "unknown key (allowed: admin, ",
        "io_threads": "expected a whole number, not '4'",
        "capacity": "'much' is not a size",
        "insecure_no_token": "expected true or false, not 'false'",
        "listen": "'tcp://h': no port",
        "grace": "expected a number, not True",
        "max_connections": "must be between 1 and 1048576: 0",
        "durability": "expected relaxed or durable, not 'maybe'",
        "admin": "'7172' is none of HOST:PORT, unix:///PATH and none",
    }.items():
        (one,) = [problem for problem in found if problem.endswith(f" @ $.{key}")]
        assert one.startswith(f"{file}: {words}")
    assert "argument --data: required, and missing" in found


def test_b53_a_flag_and_a_key_are_told_together(tmp_path: Path) -> None:
    found = problems(tmp_path, 'data = "kv"\ngrace = -1', io_threads=0)
    assert set(found) == {
        "argument --io-threads: must be between 1 and 256: 0",
        f"{tmp_path}/gateway.toml: must be >= 0: -1.0 @ $.grace",
    }


def test_what_is_wrong_between_options(tmp_path: Path) -> None:
    (one,) = problems(tmp_path, 'data = "kv"\ntoken_file = "a"\ntenants = "b"')
    assert "one of the two" in one
    found = problems(
        tmp_path, 'data = "kv"\ntls_key = "k"\ntoken_file = "nowhere"\nlisten = "tcp://0.0.0.0:1"'
    )
    assert found == (
        f"argument --token-file: cannot read '{tmp_path}/nowhere': No such file or directory",
        "--tls-certificate and --tls-key go together",
    )


@pytest.mark.parametrize("text", ["data = ", "\xff", None])
def test_a_file_that_is_none_is_one_line(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gateway.toml"
    if text is not None:
        file.write_bytes(text.encode("latin-1"))
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--config", str(file)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("adp-gateway serve: error: argument --config: ")


def test_b54_an_admin_port_beyond_loopback_has_to_be_asked_for(tmp_path: Path) -> None:
    (one,) = problems(tmp_path, 'data = "kv"\nadmin = "0.0.0.0:7172"')
    assert "say --insecure-admin" in one
    (one,) = problems(tmp_path, 'data = "kv"\nadmin = "gateway.example.org:7172"')
    assert "say --insecure-admin" in one
    config, _ = gateway_config(load(tmp_path, 'data = "kv"\nadmin = "0.0.0.0:7172"\ninsecure_admin = true'))
    assert config.admin == TCPEndpoint(host="0.0.0.0", port=7172)


def test_b54_everything_that_listens_by_default_is_local(tmp_path: Path) -> None:
    config, _ = gateway_config(load_settings({"data": str(tmp_path)}, None))
    assert config.listen == (
        TCPEndpoint(host="127.0.0.1", port=7171),
        UnixEndpoint(path=f"{tmp_path}/gateway.sock"),
    )
    assert config.admin == TCPEndpoint(host="127.0.0.1", port=7172)
    elsewhere, _ = gateway_config(
        load_settings({"data": str(tmp_path), "listen": ["tcp://127.0.0.1:1"]}, None)
    )
    assert elsewhere.admin is None, "a second gateway asks for its own"


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("none", None),
        ("127.0.0.1:0", TCPEndpoint(host="127.0.0.1", port=0)),
        ("[::1]:7172", TCPEndpoint(host="::1", port=7172)),
        ("tcp://localhost:1", TCPEndpoint(host="localhost", port=1)),
        ("unix:///run/adp.sock", UnixEndpoint(path="/run/adp.sock")),
    ],
)
def test_where_the_admin_port_can_be(text: str, endpoint: object) -> None:
    assert admin_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "7172", "tls://h:1", "::1", "h:99999"])
def test_where_it_cannot(text: str) -> None:
    with pytest.raises(ValueError, match=r"port|none|host|TLS|IPv6"):
        admin_endpoint(text)


def test_the_secret_of_a_token_file_is_in_no_problem(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    found = problems(tmp_path, 'data = "kv"\ntoken_file = "token"\ntls_key = "k"')
    assert "s3cret" not in json.dumps(found)
