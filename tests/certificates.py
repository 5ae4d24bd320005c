"""Certificates for tests, made on the spot."""

import functools
import ssl
import tempfile
from pathlib import Path
from typing import Any

import attrs
import trustme

from adp_client.transport.trust import TLSConfig, client_context, server_context


@attrs.frozen
class Files:
    """A certificate (its chain below it) and its key."""

    certificate: str
    key: str


@attrs.define(eq=False)
class Authority:
    """Signs what it is asked to sign; writes PEM files into `folder`."""

    folder: Path
    _ca: trustme.CA = attrs.field(factory=trustme.CA)
    _count: int = 0

    @property
    def file(self) -> str:
        """What to trust."""
        path = self.folder / f"authority-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(path)
        return str(path)

    def issue(self, *names: str, **options: Any) -> Files:
        """`names` are those of hosts, or addresses."""
        self._count += 1
        leaf = self._ca.issue_cert(*names, **options)
        certificate, key = (self.folder / f"{kind}-{id(self)}-{self._count}.pem" for kind in ("leaf", "key"))
        for number, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(certificate, append=number > 0)
        leaf.private_key_pem.write_to_path(key)
        return Files(str(certificate), str(key))


@functools.cache
def contexts(version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server at `localhost` and a client that trusts it, for whoever only needs a connection."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        files = authority.issue("localhost")
        server = server_context(certificate_file=files.certificate, key_file=files.key)
        client = client_context(TLSConfig(ca_file=authority.file))
    client.maximum_version = version
    return server, client
