import pytest

from adp_client import Client, TLSConfig
from adp_client.protocol.errors import ConfigError
from adp_engines.config import OffloadingConfig, structure_offloading
from adp_engines.gateway import client_factory


def problems(raw: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        structure_offloading(raw)
    return refused.value.problems


def test_empty_is_valid() -> None:
    assert structure_offloading({}) == OffloadingConfig()


def test_values_arrive_and_integers_are_fine_as_seconds() -> None:
    config = structure_offloading({"endpoint": "unix:///run/adp.sock", "load_seconds": 3, "token": "t"})
    assert (config.endpoint, config.load_seconds, config.token) == ("unix:///run/adp.sock", 3.0, "t")
    assert "'t'" not in repr(config)


def test_unknown_key_is_named_with_its_path_and_the_known_ones() -> None:
    (problem,) = problems({"enpoint": "tcp://h:1"})
    assert problem.startswith("unknown key (allowed: absent_seconds, endpoint, ")
    assert problem.endswith("@ $.adp.enpoint")


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"staging_bytes": "4096"}, "$.adp.staging_bytes"),
        ({"staging_bytes": True}, "$.adp.staging_bytes"),
        ({"staging_bytes": 4096.0}, "$.adp.staging_bytes"),
        ({"staging_bytes": 0}, "$.adp.staging_bytes"),
        ({"lookup_seconds": "1"}, "$.adp.lookup_seconds"),
        ({"lookup_seconds": False}, "$.adp.lookup_seconds"),
        ({"lookup_seconds": 0}, "$.adp.lookup_seconds"),
        ({"load_seconds": float("nan")}, "$.adp.load_seconds"),
        ({"token": 3}, "$.adp.token"),
        ({"model_id": ""}, "$.adp.model_id"),
        ({"endpoint": None}, "$.adp.endpoint"),
        ({"endpoint": "localhost:7171"}, "$.adp.endpoint"),
        ({"endpoint": "tcp://localhost"}, "$.adp.endpoint"),
        ({"endpoint": "tcp://h:0"}, "$.adp.endpoint"),
        ({"endpoint": "tls://h:0"}, "$.adp.endpoint"),
        ({"endpoint": "tls://h:1", "tls": {"ca": "x"}}, "$.adp.tls.ca"),
        ({"endpoint": "tls://h:1", "tls": {"key_file": "x"}}, "$.adp.tls"),
        ({"endpoint": "tcp://h:1", "tls": {"ca_file": "x"}}, "$.adp"),
        ({"endpoint": "unix://relative"}, "$.adp.endpoint"),
        ([], "$.adp"),
        ("tcp://h:1", "$.adp"),
        (None, "$.adp"),
    ],
)
def test_wrong_value_is_one_problem_with_its_path(raw: object, path: str) -> None:
    (problem,) = problems(raw)
    assert problem.endswith(f"@ {path}")
    assert "\n" not in problem


def test_the_settings_of_tls_reach_the_client() -> None:
    config = structure_offloading({"endpoint": "tls://h:1", "tls": {"ca_file": "ca.pem"}})
    client = client_factory(config)()
    assert isinstance(client, Client)
    assert client.config.tls == TLSConfig(ca_file="ca.pem")


def test_all_problems_at_once() -> None:
    assert len(problems({"enpoint": "x", "staging_bytes": "x", "endpoint": "x", "load_seconds": -1})) == 4
