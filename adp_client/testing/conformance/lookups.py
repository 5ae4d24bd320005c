"""Sections 5.1 to 5.3: vectors of keys, statuses, EXIST."""

from adp_client.protocol.constants import MAX_KEY_BYTES, ErrorCode, Opcode
from adp_client.protocol.messages import Exist, Read

from .clause import Chapter, expect
from .frames import frame, vector
from .trial import Trial, content

LOOKUPS: Chapter[Trial] = Chapter()

OK, NOT_FOUND = ErrorCode.OK, ErrorCode.NOT_FOUND


@LOOKUPS.clause("5.1-no-keys")
async def no_keys(trial: Trial) -> None:
    """A vector without keys is MALFORMED."""
    peer = await trial.connect()
    await trial.expect_violation(peer, frame(Opcode.EXIST, vector(trial.namespace, [])), ErrorCode.MALFORMED)


@LOOKUPS.clause("5.1-count")
async def count(trial: Trial) -> None:
    """A vector that counts more keys than it has is MALFORMED, whatever the number."""
    cases = {
        f"{number} keys, of which 1 is there": frame(
            Opcode.EXIST, vector(trial.namespace, [b"key"], count=number)
        )
        for number in (2, 0x7FFFFFFF, 0xFFFFFFFF)
    }
    await trial.expect_violations(cases, ErrorCode.MALFORMED)


@LOOKUPS.clause("5.1-argument")
async def argument(trial: Trial) -> None:
    """The argument of a vector is 0 except in EXIST: another is MALFORMED."""
    peer = await trial.connect()
    raw = frame(Opcode.DELETE, vector(trial.namespace, [b"key"], argument=1))
    await trial.expect_violation(peer, raw, ErrorCode.MALFORMED)


@LOOKUPS.clause("5.1-too-many-items")
async def too_many_items(trial: Trial) -> None:
    """More items than `max items` in one request are LIMIT_EXCEEDED."""
    number = trial.limits.max_items + 1
    trial.need(number < 1 << 20, "the gateway takes more than a million keys in a request")
    peer = await trial.connect()
    raw = frame(Opcode.EXIST, vector(trial.namespace, [b"k"] * number))
    await trial.expect_violation(peer, raw, ErrorCode.LIMIT_EXCEEDED)


@LOOKUPS.clause("5.1-key-width")
async def key_width(trial: Trial) -> None:
    """Keys wider than `max key bytes`, or of no width, are LIMIT_EXCEEDED."""
    cases = {
        f"a key of {width} bytes": frame(Opcode.EXIST, vector(trial.namespace, [b"k" * width]))
        for width in (0, trial.limits.max_key_bytes + 1, MAX_KEY_BYTES + 1)
    }
    await trial.expect_violations(cases, ErrorCode.LIMIT_EXCEEDED)


@LOOKUPS.clause("5.1-narrow-and-wide-keys")
async def narrow_and_wide_keys(trial: Trial) -> None:
    """Keys of one byte, and of `max key bytes`, name objects like any others."""
    peer = await trial.connect()
    for number, width in enumerate((1, trial.limits.max_key_bytes)):
        objects = [(b"\x2f" * width, content(100, number)), (b"\xf2" * width, content(50, number))]
        await trial.store(peer, objects)
        await trial.expect_objects(peer, objects)


@LOOKUPS.clause("5.1-whole-keys")
async def whole_keys(trial: Trial) -> None:
    """A key counts to its last byte: of `max key bytes`, two that differ in one byte are two objects."""
    width = trial.limits.max_key_bytes
    first, last = b"k" * (width - 1) + b"1", b"k" * (width - 1) + b"2"
    never = b"K" + first[1:]
    peer = await trial.connect()
    await trial.store(peer, [(first, content(100, 1))])
    expect("EXIST of keys that differ in one byte", [OK, NOT_FOUND], await trial.exist(peer, [first, last]))
    await trial.store(peer, [(last, content(100, 2))])
    await trial.expect_objects(peer, [(first, content(100, 1)), (last, content(100, 2))])
    if width > 1:
        await trial.expect_objects(peer, [(never, None)])
    expect("DELETE of one of two", [OK], await trial.delete(peer, [first]))
    await trial.expect_objects(peer, [(first, None), (last, content(100, 2))])


@LOOKUPS.clause("5.1-opaque-keys")
async def opaque_keys(trial: Trial) -> None:
    """Keys are opaque bytes: zeros, slashes, dots and what is no text name different objects."""
    names = [b"\0\0\0\0", b"../x", b"/etc", b"\xff\xfe\0\n", b"k\0\0\0", b"K\0\0\0", b"    "]
    objects = [(name, content(20, number)) for number, name in enumerate(names)]
    peer = await trial.connect()
    await trial.store(peer, objects)
    await trial.expect_objects(peer, objects)
    await trial.expect_objects(peer, [(b"k", None)])


@LOOKUPS.clause("5.1-namespaces")
async def namespaces(trial: Trial) -> None:
    """A key in one namespace is nothing in another."""
    (key,) = trial.keys(1)
    other = bytes(31 * [0]) + b"\1" if trial.namespace[0] else b"\1" + bytes(31)
    peer = await trial.connect()
    await trial.store(peer, [(key, content(10))])
    near = trial.namespace[:-1] + bytes([trial.namespace[-1] ^ 1])
    for namespace in (other, near):
        answer = await peer.call(Exist(namespace=namespace, keys=(key,)))
        expect("EXIST of a key in another namespace", [NOT_FOUND], answer.statuses)
        answer = await peer.call(Read(namespace=namespace, keys=(key,), capacities=(10,)))
        expect("READ of a key in another namespace", [NOT_FOUND], answer.statuses)


@LOOKUPS.clause("5.1-twice")
async def twice(trial: Trial) -> None:
    """A key may stand twice in a vector; each place is answered."""
    there, absent = trial.keys(2)
    peer = await trial.connect()
    data = content(100)
    await trial.store(peer, [(there, data)])
    keys = [there, absent, there, absent, there]
    expect(
        "EXIST of keys that stand twice", [OK, NOT_FOUND, OK, NOT_FOUND, OK], await trial.exist(peer, keys)
    )
    await trial.expect_objects(peer, [(key, data if key == there else None) for key in keys])


@LOOKUPS.clause("5.3-exist")
async def exist(trial: Trial) -> None:
    """EXIST says OK of what is there and NOT_FOUND of what is not, each in its place."""
    keys = trial.keys(min(64, trial.limits.max_items))
    there = keys[::3]
    peer = await trial.connect()
    await trial.store(peer, [(key, content(8, number)) for number, key in enumerate(there)])
    expected = [OK if key in there else NOT_FOUND for key in keys]
    expect("EXIST of a mixture", expected, await trial.exist(peer, keys))


@LOOKUPS.clause("5.3-exist-many")
async def exist_many(trial: Trial) -> None:
    """EXIST takes ten thousand keys in one request, or what the limits allow, and answers each once."""
    width = min(16, trial.limits.max_key_bytes)
    most = min(trial.limits.max_items, (trial.limits.max_body_bytes - 48) // width)
    keys = trial.keys(min(10_000, most, 256**width), width=width)
    peer = await trial.connect()
    await trial.store(peer, [(keys[-1], b"the last")])
    found = await trial.exist(peer, keys)
    expect("the number of statuses", len(keys), len(found))
    expect("the keys that are there", [len(keys) - 1], [at for at, code in enumerate(found) if code is OK])


@LOOKUPS.clause("5.2-small-frames")
async def small_frames(trial: Trial) -> None:
    """A reply that is larger than the client's frames comes in several; each item is answered once."""
    keys = trial.keys(min(10_000, trial.limits.max_items))
    keys = keys[: (trial.limits.max_body_bytes - 48) // (len(keys[0]) + 4)]
    peer = await trial.connect(max_body_bytes=1024)
    for message in (
        Exist(namespace=trial.namespace, keys=keys),
        Read(namespace=trial.namespace, keys=keys[:300], capacities=(1,) * len(keys[:300])),
    ):
        statuses = (await peer.call(message)).statuses
        expect("the number of statuses", len(message.keys), len(statuses))
        expect("statuses other than NOT_FOUND", 0, len(statuses) - statuses.count(NOT_FOUND))
