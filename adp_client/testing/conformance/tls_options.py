"""`--tls-ca`, `--tls-certificate`, `--tls-key`: for commands that dial a gateway to try it."""

import argparse

from adp_client.transport import Endpoint, TLSConfig, TLSEndpoint


def add_tls_options(parser: argparse._ActionsContainer) -> None:
    """The options, for a parser or a group of one."""
    for name, meaning in (
        ("ca", "trust these authorities; default: whom the system trusts"),
        ("certificate", "show this certificate"),
        ("key", "the private key of the certificate"),
    ):
        parser.add_argument(f"--tls-{name}", metavar="FILE", help=f"for tls://, PEM: {meaning}")


def chosen_tls(endpoint: Endpoint, options: argparse.Namespace) -> TLSConfig | None:
    """What they say of TLS with `endpoint`. Raises ValueError for options that do not go together."""
    config = TLSConfig(
        ca_file=options.tls_ca, certificate_file=options.tls_certificate, key_file=options.tls_key
    )
    problems = config.problems()
    if config != TLSConfig() and not isinstance(endpoint, TLSEndpoint):
        problems.append(f"--tls-... is for endpoints tls://HOST:PORT; {endpoint} is not one")
    if problems:
        raise ValueError("; ".join(problems))
    return config if isinstance(endpoint, TLSEndpoint) else None
