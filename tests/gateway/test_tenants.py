"""Tenants, tokens, and the file that names them."""

import hashlib
from pathlib import Path

import pytest

from adp_client.protocol.errors import ConfigError
from adp_client.transport import UnixEndpoint
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.tenants import Door, Tenant, digest_of, load_tenants

NAMESPACE = bytes(range(32))


def tenant(name: str, token: bytes = b"t") -> Tenant:
    return Tenant(name=name, token_digest=digest_of(token))


def test_no_two_tenants_share_a_namespace() -> None:
    names = ["a", "b", "aa", "a.b"]
    spaces = [NAMESPACE, bytes(32), NAMESPACE[::-1]]
    stored = {(name, space): tenant(name).stored(space) for name in names for space in spaces}
    assert len(set(stored.values())) == len(stored)
    for (name, space), found in stored.items():
        assert len(found) == 32
        assert found.startswith(tenant(name).account.prefix)
        assert found == tenant(name, b"another token").stored(space), "the name decides, not the token"


def test_names_in_the_store_are_what_the_decision_says() -> None:
    """They are on disk: another derivation would lose every tenant's objects."""
    own = hashlib.sha256(b"adp/1 tenant\0team-a").digest()[:8]
    rest = hashlib.sha256(b"adp/1 tenant\0team-a\0" + NAMESPACE).digest()[:24]
    assert tenant("team-a").stored(NAMESPACE) == own + rest


def test_everybody_s_token_and_nobody_else_s() -> None:
    tenants = [tenant("a", b"alpha"), tenant("b", b"beta")]
    door = Door(tenants=tenants)
    assert [door.admit(token) for token in (b"alpha", b"beta")] == tenants
    for wrong in (b"", b"alp", b"alphabet", b"ALPHA", b"alpha ", b"gamma", digest_of(b"alpha")):
        assert door.admit(wrong) is None


def test_one_token_for_all_or_none() -> None:
    for door, token in ((Door(), b""), (Door(), b"anything"), (Door(token=b"secret"), b"secret")):
        found = door.admit(token)
        assert found is not None
        assert (found.name, found.stored(NAMESPACE)) == ("", NAMESPACE)
    assert Door(token=b"secret").admit(b"") is None


def test_no_token_shows() -> None:
    assert "secret" not in repr(tenant("a", b"secret"))
    assert digest_of(b"secret").hex() not in repr(tenant("a", b"secret"))
    assert str(digest_of(b"secret")) not in repr(tenant("a", b"secret"))


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "a.token").write_bytes(b" alpha\n")
    (tmp_path / "b.token").write_bytes(b"beta")
    (tmp_path / "empty").write_bytes(b"\n")

    def write(text: str) -> Path:
        path = tmp_path / "tenants.toml"
        path.write_text(text)
        return path

    return write


def test_a_file_of_tenants(write, tmp_path: Path) -> None:
    digest = digest_of(b"gamma").hex().upper()
    tenants, files = load_tenants(
        write(
            f"""
            [tenants.a]
            token_file = "a.token"
            quota = "100GiB"
            [tenants.b]
            token_file = "{tmp_path}/b.token"
            quota = 4096
            [tenants."c.d_e-f"]
            token_sha256 = "{digest}"
            """
        )
    )
    assert [(each.name, each.quota_bytes) for each in tenants] == [
        ("a", 100 << 30),
        ("b", 4096),
        ("c.d_e-f", None),
    ]
    assert files == (tmp_path / "a.token", tmp_path / "b.token")
    door = Door(tenants=tenants)
    assert [door.admit(token) for token in (b"alpha", b"beta", b"gamma")] == list(tenants)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("x = [", ["is not TOML"]),
        ("", ["required, and missing @ $.tenants"]),
        ("[tenants]", ["at least one table [tenants.NAME] @ $"]),
        ("tenants = 3", ["expected a table, not 3 @ $.tenants"]),
        (
            '[tenants.a]\ntoken_file = "a.token"\nquota = "much"\n[tenants.b]\ntoken = "s"\n'
            '[tenants.c]\ntoken_sha256 = "xyz"\nquota = true\n[tenants.d]\ntoken_file = 3\nquota = -1\n',
            [
                "'much' is not a size: write 100GiB, 512MiB or a number of bytes @ $.tenants['a'].quota",
                "unknown key (allowed: quota, token_file, token_sha256) @ $.tenants['b'].token",
                "expected 64 hexadecimal digits @ $.tenants['c'].token_sha256",
                "expected a size, as in 100GiB, not True @ $.tenants['c'].quota",
                "expected text, not 3 @ $.tenants['d'].token_file",
                "a quota is at least 1 byte: leave it out for as much as there is @ $.tenants['d'].quota",
            ],
        ),
        (
            "[tenants.a]\n[tenants.b]\ntoken_file = 'a.token'\ntoken_sha256 = '" + "0" * 64 + "'",
            ["one of the two @ $.tenants['a']", "one of the two @ $.tenants['b']"],
        ),
        (
            '[tenants.a]\ntoken_file = "a.token"\n[tenants.b]\ntoken_file = "nowhere"\n'
            '[tenants.c]\ntoken_file = "empty"\n[tenants."d e"]\ntoken_file = "b.token"\n'
            f'[tenants.f]\ntoken_sha256 = "{digest_of(b"alpha").hex()}"',
            [
                "No such file or directory @ $.tenants['b'].token_file",
                "must hold a token of 1 to 4096 bytes @ $.tenants['c'].token_file",
                "a name is up to 64 letters, digits and ._- @ $.tenants['d e']",
                "the token is a's, too @ $.tenants['f']",
            ],
        ),
    ],
)
def test_every_mistake_is_told_with_its_place(write, text: str, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tenants(write(text))
    assert len(caught.value.problems) == len(problems)
    for problem, expected in zip(caught.value.problems, problems, strict=True):
        assert expected in problem


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_tenants(tmp_path / "none.toml")


def test_a_configuration_has_tenants_or_a_token_and_their_accounts(tmp_path: Path) -> None:
    tenants = (tenant("a"),)
    store = StoreConfig(directory=tmp_path, accounts=(tenants[0].account,))
    listen = (UnixEndpoint(path="/s"),)
    GatewayConfig(store=store, listen=listen, tenants=tenants)
    with pytest.raises(ValueError, match="one of the two"):
        GatewayConfig(store=store, listen=listen, tenants=tenants, token=b"t")
    with pytest.raises(ValueError, match="accounts"):
        GatewayConfig(store=StoreConfig(directory=tmp_path), listen=listen, tenants=tenants)
