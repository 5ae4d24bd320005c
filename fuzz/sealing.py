"""Bytes <-> frames whose checksums are right, so that a mutation of the bytes gets past them."""

import zlib

from adp_client.protocol import Opcode
from adp_client.protocol.constants import HEADER_BYTES, Flag
from adp_client.protocol.frames import FrameHeader, decode_header, encode_header


def sealed(data: bytes) -> bytes:
    """Turn arbitrary bytes into frames whose checksums are right, so that a mutation reaches a body's reader.

    Each frame is cut from `data` as: opcode, flags, request id, body length, payload length (one byte each,
    lengths in units of 1 and 4 bytes), then body and payload.
    """
    raw, at = b"", 0
    while at + 5 <= len(data):
        opcode, flags, number, body_bytes, payload_units = data[at : at + 5]
        at += 5
        body = data[at : at + body_bytes]
        at += body_bytes
        payload = data[at : at + 4 * payload_units]
        at += 4 * payload_units
        header = FrameHeader(
            opcode=Opcode(opcode % len(Opcode) + 1),
            flags=Flag(flags & 3),
            request_id=number,
            body_bytes=len(body),
            payload_bytes=len(payload),
            body_crc=zlib.crc32(body),
        )
        raw += encode_header(header) + body + payload
    return raw


def unsealed(raw: bytes) -> bytes:
    """The inverse of `sealed`, for seeds: frames in the five-byte form, but for those too big for it."""
    data, at = b"", 0
    while at < len(raw):
        header = decode_header(memoryview(raw)[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        body, payload = raw[at : at + header.body_bytes], b""
        at += header.body_bytes
        payload = raw[at : at + header.payload_bytes]
        at += header.payload_bytes
        units = -(-len(payload) // 4)
        if len(body) < 256 and header.request_id < 256 and len(payload) == 4 * units:
            data += bytes([header.opcode - 1, header.flags, header.request_id, len(body), units])
            data += body + payload
    return data


def split(data: bytes) -> tuple[int, bytes]:
    """The first byte says how the rest is read: bit 0 as frames to be sealed, the rest the size of pieces."""
    if not data:
        return 1, b""
    mode, rest = data[0], data[1:]
    return (1 << (mode >> 1) % 16), sealed(rest) if mode & 1 else rest
