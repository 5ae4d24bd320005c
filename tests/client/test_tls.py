"""TLS below the client: what the files must be, and what an attacker on the way can do to the stream."""

import contextlib
import re
import socket
import ssl
import tempfile
import tracemalloc
from pathlib import Path

import anyio
import pytest
from cryptography.hazmat.primitives import serialization

from adp_client.transport import FileRange, TLSConfig, TLSFailure, TLSTransport
from adp_client.transport.sockets import BULK_BYTES
from adp_client.transport.tls import MAX_UNASKED_BYTES, PIECE_BYTES
from adp_client.transport.trust import client_context, failure, server_context
from certificates import Authority, contexts

MIB = 1 << 20


# ------------------------------------------------------------------------------------------------ the files


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def refused(**files: str) -> str:
    with pytest.raises(TLSFailure) as caught:
        server_context(**files)
    assert caught.value.is_lasting
    return str(caught.value)


def test_what_the_files_must_be(authority: Authority, tmp_path: Path) -> None:
    one, other = authority.issue("one"), authority.issue("other")
    empty, locked = tmp_path / "empty.pem", tmp_path / "locked.pem"
    empty.write_bytes(b"")
    key = serialization.load_pem_private_key(Path(one.key).read_bytes(), None)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    ours = one.certificate
    assert refused(certificate_file=ours, key_file=other.key).endswith(f"is not the key of {ours!r}")
    assert "is encrypted; write it without a passphrase" in refused(
        certificate_file=ours, key_file=str(locked)
    )
    assert "cannot read '/nonexistent': No such file" in refused(
        certificate_file=ours, key_file="/nonexistent"
    )
    assert "not a certificate and its key in PEM" in refused(certificate_file=str(empty), key_file=one.key)
    assert "holds no certificates in PEM form" in refused(
        certificate_file=ours, key_file=one.key, client_ca_file=str(empty)
    )
    with pytest.raises(TLSFailure, match=re.escape(f"'ca_file': cannot read '{tmp_path}': Is a directory")):
        client_context(TLSConfig(ca_file=str(tmp_path)))


def test_nothing_below_1_2_and_no_way_around_verification(authority: Authority) -> None:
    for context in (*contexts(), client_context(TLSConfig())):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
        assert context.options & ssl.OP_NO_RENEGOTIATION
    trusting = client_context(TLSConfig(ca_file=authority.file))
    assert trusting.check_hostname
    assert trusting.verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("reason", "sentence", "is_lasting"),
    [
        ("NO_SHARED_CIPHER", "no way of TLS in common", True),
        ("TLSV1_ALERT_PROTOCOL_VERSION", "no way of TLS in common", True),
        ("SSLV3_ALERT_CERTIFICATE_EXPIRED", "this end's certificate has expired", True),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", "it wants a certificate, or other ciphers", True),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "shows no certificate", True),
        ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "decryption failed or bad record mac", False),
        (None, "some text", False),
    ],
)
def test_sentences(reason: str | None, sentence: str, is_lasting: bool) -> None:
    error = ssl.SSLError(1, "some text")
    error.reason = reason
    told = failure(error)
    assert sentence in str(told)
    assert told.is_lasting is is_lasting


# ----------------------------------------------------------------------------------------------- the stream


class Between:
    """Two ends that have shaken hands, each on a socket of its own, and whatever a test does in between."""

    def __init__(self, **options: object) -> None:
        for_server, for_client = contexts()
        one, self.at_server = socket.socketpair()
        other, self.at_client = socket.socketpair()
        self.server = TLSTransport(one, for_server)
        self.client = TLSTransport(other, for_client, server_name="localhost")
        ends = (self.client.cipher, self.server.cipher)
        while not (ends[0].shake_hands() & ends[1].shake_hands()):
            for left, right in (ends, ends[::-1]):
                if raw := left.take():
                    right.feed(raw)

    async def __aenter__(self) -> "Between":
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport in (self.server, self.client):
            await transport.aclose()
        for sock in (self.at_server, self.at_client):
            sock.close()

    def records(self, *texts: bytes) -> bytes:
        """What the server would send."""
        for text in texts:
            self.server.cipher.write(text)
        return self.server.cipher.take()


@pytest.mark.anyio
async def test_an_end_that_tls_did_not_announce_is_an_error_also_between_frames() -> None:
    async with Between() as between:
        between.at_client.send(between.records(b"a frame"))
        between.at_client.shutdown(socket.SHUT_WR)
        view = memoryview(bytearray(100))
        assert await between.client.receive_some([view]) == 7  # what came before the end is delivered
        for _ in range(2):
            with pytest.raises(TLSFailure, match="it ended without TLS saying so"):
                await between.client.receive_some([view])


@pytest.mark.anyio
async def test_an_end_that_tls_announced_is_one() -> None:
    async with Between() as between:
        await between.server.aclose()
        raw = between.at_server.recv(1000)
        assert raw
        between.at_client.send(raw)
        between.at_client.shutdown(socket.SHUT_WR)
        view = memoryview(bytearray(100))
        assert await between.client.receive_some([view]) == 0
        with pytest.raises(EOFError):
            await between.client.receive_exactly([view])


@pytest.mark.anyio
async def test_an_abort_announces_nothing() -> None:
    async with Between() as between:
        between.server.abort()
        await between.server.aclose()
        assert between.at_server.recv(1000) == b""
        between.server.abort()


@pytest.mark.anyio
@pytest.mark.parametrize("count", [100, 2 * MIB])
@pytest.mark.parametrize("damage", ["flip", "cut", "twice"])
async def test_what_was_changed_on_the_way_is_an_error_and_lets_go_of_memory(count: int, damage: str) -> None:
    async with Between() as between:
        raw = bytearray(between.records(b"first", bytes(count)))
        if damage == "flip":
            raw[-1] ^= 1
        elif damage == "cut":
            del raw[-1]
        else:
            raw = raw[:40] + raw  # the beginning of a record that came before
        memory = bytearray(count + 5)
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                with between.at_client.dup() as sock, contextlib.suppress(OSError):
                    await anyio.to_thread.run_sync(sock.sendall, raw)
                    sock.shutdown(socket.SHUT_WR)

            tasks.start_soon(send)
            with pytest.raises(TLSFailure) as caught:
                await between.client.receive_exactly([memoryview(memory)])
            assert not caught.value.is_lasting
            del caught  # its traceback has the call's own arguments, and an idle worker thread has it too
            if count < BULK_BYTES:
                memory.append(1)  # BufferError while anybody has a view of it
            between.at_client.close()
        with pytest.raises(OSError, match=r".*"):
            await between.client.send([b"x"])


@pytest.mark.anyio
async def test_who_aborted_is_told_so_and_not_that_it_was_attacked() -> None:
    async with Between() as between, anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises(ConnectionAbortedError, match="aborted by this side"):
                await between.client.receive_some([memoryview(bytearray(1))])

        tasks.start_soon(receive)
        await anyio.wait_all_tasks_blocked()
        between.client.abort()


@pytest.mark.anyio
async def test_a_peer_that_only_makes_tls_answer_is_cut_before_it_costs_memory() -> None:
    async with Between() as between:
        between.client.cipher._out.write(bytes(MAX_UNASKED_BYTES + 1))  # as OpenSSL's answers would
        with pytest.raises(TLSFailure, match="nothing but requests of TLS"):
            await between.client.receive_some([memoryview(bytearray(1))])


@pytest.mark.anyio
async def test_a_cancelled_handshake_ends_the_stream() -> None:
    for_server, for_client = contexts()
    one, other = socket.socketpair()
    server = TLSTransport(one, for_server)
    client = TLSTransport(other, for_client, server_name="localhost")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.handshake)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    with pytest.raises(OSError, match=r".*"):
        await server.handshake()
    await client.aclose()
    await server.aclose()


@pytest.mark.anyio
async def test_a_name_that_can_be_in_no_certificate() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(TLSFailure, match="not a host's name"):
        TLSTransport(one, contexts()[1], server_name=".example")


@pytest.mark.anyio
async def test_a_large_file_is_sent_in_pieces() -> None:
    """Memory is bounded: by a piece, and what it becomes when it is enciphered."""
    size = 32 * MIB
    memory = bytearray(size)
    async with Between() as between:
        between.at_client.close(), between.at_server.close()
    one, other = socket.socketpair()
    for_server, for_client = contexts()
    server = TLSTransport(one, for_server)
    client = TLSTransport(other, for_client, server_name="localhost")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.handshake)
        tasks.start_soon(client.handshake)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        tracemalloc.start()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(server.send, [b"head", FileRange(file.fileno(), 0, size - 4)])
                await client.receive_exactly([memoryview(memory)])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert memory[:5] == b"head\0"
    assert peak < 8 * PIECE_BYTES
    await client.aclose()
    await server.aclose()
