"""Whom the two ends of a TLS connection trust, and how they prove who they are: certificates, in files.

Verification cannot be switched off. A certificate that signed itself is trusted by naming it as `ca_file`.
"""

import ssl
from pathlib import Path
from typing import Any

import attrs

from adp_client.protocol.errors import ConfigError


class TLSFailure(ConnectionError):
    """TLS could not be had, or broke; the text is a sentence.

    `is_lasting`: another attempt will fail in the same way until somebody changes something.
    """

    def __init__(self, reason: str, *, is_lasting: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting = is_lasting


def _file(_instance: object, attribute: "attrs.Attribute[Any]", value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError((f"{attribute.name} must be the path of a file, as text, not {value!r}",))


def _server_name(_instance: object, _attribute: object, value: Any) -> None:
    if value is None:
        return
    is_text = isinstance(value, str)
    if not is_text or not value.isascii() or not value.strip(".") or value.startswith("."):
        raise ConfigError((f"{value!r} is not the name of a host",))


@attrs.frozen(kw_only=True)
class TLSConfig:
    """How a client uses TLS. The files are PEM, and are read anew for each attempt to connect."""

    #: Certificates of the authorities to trust. null: those that the system trusts.
    ca_file: str | None = attrs.field(default=None, validator=_file)
    #: What the client shows to a gateway that asks for it, with what leads up to its authority.
    certificate_file: str | None = attrs.field(default=None, validator=_file)
    #: The private key of `certificate_file`, not encrypted.
    key_file: str | None = attrs.field(default=None, validator=_file)
    #: The name that the gateway's certificate must have, where it is not the endpoint's host.
    server_name: str | None = attrs.field(default=None, validator=_server_name)

    def problems(self) -> list[str]:
        """What is wrong between fields."""
        if (self.certificate_file is None) != (self.key_file is None):
            return ["certificate_file and key_file go together"]
        return []


def client_context(config: TLSConfig) -> ssl.SSLContext:
    """Reads the files: call it in a worker thread. Raises TLSFailure."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)  # verifies the chain and the name
    if config.ca_file is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_authorities(context, "ca_file", config.ca_file)
    if config.certificate_file is not None and config.key_file is not None:
        _load_identity(context, config.certificate_file, config.key_file)
    return context


def server_context(
    *, certificate_file: str, key_file: str, client_ca_file: str | None = None
) -> ssl.SSLContext:
    """Reads the files. With `client_ca_file`, clients must show a certificate of it. Raises TLSFailure."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0  # connections live long: nobody resumes one
    _load_identity(context, certificate_file, key_file)
    if client_ca_file is not None:
        _load_authorities(context, "client_ca_file", client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    # An end that TLS did not announce is an attack until proven otherwise; never a clean end.
    context.options &= ~getattr(ssl, "OP_IGNORE_UNEXPECTED_EOF", 0)
    return context


def _check_readable(setting: str, file: str) -> None:
    try:
        with Path(file).open("rb") as opened:
            opened.read(1)
    except OSError as exc:
        raise TLSFailure(f"'{setting}': cannot read {file!r}: {exc.strerror}", is_lasting=True) from None


def _load_authorities(context: ssl.SSLContext, setting: str, file: str) -> None:
    _check_readable(setting, file)
    try:
        context.load_verify_locations(cafile=file)
    except ssl.SSLError as exc:
        raise TLSFailure(f"'{setting}': {file!r} holds no certificates in PEM form", is_lasting=True) from exc


def _load_identity(context: ssl.SSLContext, certificate_file: str, key_file: str) -> None:
    _check_readable("certificate_file", certificate_file)
    _check_readable("key_file", key_file)
    is_asked: list[bool] = []

    def password() -> str:  # without it, OpenSSL would ask whoever sits at the terminal
        is_asked.append(True)
        return ""

    try:
        context.load_cert_chain(certificate_file, key_file, password=password)
    except ssl.SSLError as exc:
        if is_asked:
            problem = f"'key_file': {key_file!r} is encrypted; write it without a passphrase"
        elif exc.reason == "KEY_VALUES_MISMATCH":
            problem = f"'key_file': {key_file!r} is not the key of {certificate_file!r}"
        elif "TOO_SMALL" in str(exc.reason) or exc.reason == "CA_MD_TOO_WEAK":
            problem = f"'certificate_file': {certificate_file!r} is too weak: {_plain(exc)}"
        else:
            problem = (
                f"'certificate_file': {certificate_file!r} and {key_file!r} are not a certificate and its "
                f"key in PEM form: {_plain(exc)}"
            )
        raise TLSFailure(problem, is_lasting=True) from exc


# ---------------------------------------------------------------------------------------- errors of OpenSSL

_CERTIFICATE_ALERTS = {
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it asks for a certificate, and got none",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not know the authority that signed this end's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "this end's certificate has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "this end's certificate has been revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept this end's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept this end's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept this kind of certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not accept this end's signature",
    "TLSV1_ALERT_ACCESS_DENIED": "it denies this end's certificate access",
}
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "HTTPS_PROXY_REQUEST",
    "UNKNOWN_PROTOCOL",
    "PACKET_LENGTH_TOO_LONG",
)
_NOTHING_IN_COMMON = (
    *("TLSV1_ALERT_PROTOCOL_VERSION", "UNSUPPORTED_PROTOCOL", "VERSION_TOO_LOW", "NO_PROTOCOLS_AVAILABLE"),
    *("NO_SHARED_CIPHER", "NO_SHARED_SIGNATURE_ALGORITHMS", "TLSV1_ALERT_INSUFFICIENT_SECURITY"),
)
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)  # X509_V_ERR_...: self-signed, no issuer, no way to verify


def failure(exc: ssl.SSLError) -> TLSFailure:
    """What the error means, in a sentence."""
    reason = exc.reason or ""
    if isinstance(exc, ssl.SSLCertVerificationError):
        said = exc.verify_message.rstrip(".")
        authority = (
            "signed by no authority that is trusted here: " if exc.verify_code in _UNKNOWN_AUTHORITY else ""
        )
        return TLSFailure(f"the other end's certificate is not accepted: {authority}{said}", is_lasting=True)
    if isinstance(exc, ssl.SSLEOFError) or reason == "UNEXPECTED_EOF_WHILE_READING":
        return TLSFailure("the connection was cut: it ended without TLS saying so")
    if reason in _CERTIFICATE_ALERTS:
        return TLSFailure(f"the other end refuses: {_CERTIFICATE_ALERTS[reason]}", is_lasting=True)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return TLSFailure("the other end shows no certificate", is_lasting=True)
    if reason in _NOT_TLS:
        return TLSFailure("the other end does not speak TLS", is_lasting=True)
    if reason in _NOTHING_IN_COMMON:
        return TLSFailure(f"the two ends have no way of TLS in common: {_plain(exc)}", is_lasting=True)
    if reason == "SSLV3_ALERT_HANDSHAKE_FAILURE":
        return TLSFailure(
            "the other end refuses the handshake: it wants a certificate, or other ciphers", is_lasting=True
        )
    return TLSFailure(f"TLS failed: {_plain(exc)}")


def _plain(exc: ssl.SSLError) -> str:
    return (exc.reason or str(exc.args[-1])).lower().replace("_", " ")
