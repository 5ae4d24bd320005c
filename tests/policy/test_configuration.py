"""docs/reference/configuration.md lists every key there is, with the default it has."""

import json
import re

import attrs
import pytest

from adp_client.config import BackoffConfig, ClientConfig, Timeouts, TLSConfig
from adp_engines.config import OffloadingConfig
from adp_gateway.cli import make_parser
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
    ],
)
def test_every_key_is_listed_with_its_default(heading: str, settings: type[attrs.AttrsInstance]) -> None:
    assert documented(heading) == {field.name: written(field.default) for field in attrs.fields(settings)}


def test_every_option_of_the_gateway_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    options = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE))
    assert documented("Gateway: `adp-gateway serve`").keys() == options - {"--help"}
