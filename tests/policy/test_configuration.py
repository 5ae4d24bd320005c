"""docs/reference/configuration.md lists every key there is, with the default it has."""

import json
import re

import attrs
import pytest

from adp_client.config import BackoffConfig, ClientConfig, Timeouts, TLSConfig
from adp_engines.config import OffloadingConfig
from adp_gateway.cli import make_parser
from adp_gateway.cli.settings import ServeSettings, flag_of
from adp_gateway.tenants import TenantSettings
from policy.checkout import ROOT

PAGE = (ROOT / "docs" / "reference" / "configuration.md").read_text()
SECTIONS = dict(re.findall(r"^#+ ([^\n]+)\n(.*?)(?=^#|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


def documented(heading: str) -> dict[str, str]:
    """The table below a heading: first column to second."""
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", SECTIONS[heading], flags=re.MULTILINE)
    assert len(dict(rows)) == len(rows)
    return dict(rows)


def written(default: object) -> str:
    if default is attrs.NOTHING:
        return "(required)"
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
        return "(below)"  # a section of its own
    return f"`{json.dumps(default)}`"


@pytest.mark.parametrize(
    ("heading", "settings"),
    [
        ("vLLM: `kv_connector_extra_config`", OffloadingConfig),
        ("Client: `adp_client.ClientConfig`", ClientConfig),
        ("`tls`", TLSConfig),
        ("`timeouts`", Timeouts),
        ("`backoff`", BackoffConfig),
        ("`--tenants FILE`", TenantSettings),
        ("Gateway: `adp-gateway serve`", ServeSettings),
    ],
)
def test_every_key_is_listed_with_its_default(heading: str, settings: type[attrs.AttrsInstance]) -> None:
    assert documented(heading) == {field.name: written(field.default) for field in attrs.fields(settings)}


COMMANDS = (ROOT / "docs" / "reference" / "gateway-command.md").read_text()


@pytest.mark.parametrize("command", ["serve", "check", "stat", "dump"])
def test_every_option_of_the_gateway_is_listed(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE))
    (section,) = re.findall(
        rf"^## `adp-gateway {command} .*?(?=^## |\Z)", COMMANDS, flags=re.MULTILINE | re.DOTALL
    )
    rows = re.findall(r"^\| `(--[\w-]+)[^|]*\|", section, flags=re.MULTILINE)
    assert sorted(rows) == sorted(options - {"--help"})


def test_flags_and_keys_of_the_gateway_are_the_same() -> None:
    options = vars(make_parser().parse_args(["serve"]))
    assert options.keys() == {"command", "function"}, "a flag that was not given hides no key"
    for field in attrs.fields(ServeSettings):
        value = {bool: [], int: ["1"], float: ["1"]}.get(
            field.type, [(field.metadata.get("choices") or "x")[0]]
        )
        given = make_parser().parse_args(["serve", flag_of(field.name), *value])
        assert field.name in vars(given)


@pytest.mark.parametrize("command", ["serve", "check", "stat", "dump"])
def test_the_exit_statuses_in_the_help_are_those_of_the_reference(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([command, "--help"])
    helped = set(re.findall(r"^  (\d+) ", capsys.readouterr().out, flags=re.MULTILINE))
    name = "`stat` and `dump`" if command in ("stat", "dump") else ""
    (section,) = re.findall(
        rf"^## `adp-gateway {'dump' if name else command} .*?(?=^## |\Z)",
        COMMANDS,
        flags=re.MULTILINE | re.DOTALL,
    )
    rows = re.findall(r"^\| (\d[\d, ]*) \|", section, flags=re.MULTILINE)
    assert helped == {number for row in rows for number in row.split(", ")} - {"143"}


def test_every_event_of_the_log_is_listed() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "adp_gateway").rglob("*.py"))
    events = set(re.findall(r'"event": "(\w+)"', sources)) | {"failed", "directory_unusable"}
    (table,) = re.findall(r"^\| `event` \| fields \|\n(.*?)\n\n", COMMANDS, flags=re.MULTILINE | re.DOTALL)
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed == events
