"""Section 5.4: READ."""

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Read

from .clause import Chapter, expect
from .peer import checksum_of
from .trial import Trial, content

READING: Chapter[Trial] = Chapter()

OK, NOT_FOUND, TOO_LARGE = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.TOO_LARGE


@READING.clause("5.4-exact")
async def exact(trial: Trial) -> None:
    """READ brings the bytes that were written, with their size and their checksum."""
    sizes = [1, 2, 511, 4095, 4096, 4097, 65_537, 300_000, (1 << 20) + 1]
    sizes = [
        size for size in sizes if size <= min(trial.largest_bytes, trial.limits.max_inflight_bytes // 16)
    ]
    objects = [
        (key, content(size, number))
        for number, (key, size) in enumerate(zip(trial.keys(len(sizes)), sizes, strict=True))
    ]
    peer = await trial.connect()
    for each in objects:
        await trial.store(peer, [each])
    await trial.expect_objects(peer, objects)
    message = Read(namespace=trial.namespace, keys=tuple(key for key, _ in objects), capacities=tuple(sizes))
    rows = (await peer.call(message)).items
    for number, (_, data) in enumerate(objects):
        expect("the checksum of an object", checksum_of(data), rows[number].checksum)
        expect("the object bytes of an object", len(data), rows[number].object_bytes)


@READING.clause("5.4-not-found")
async def not_found(trial: Trial) -> None:
    """READ of what is not there is NOT_FOUND in its place, and the others come."""
    keys = trial.keys(min(9, trial.limits.max_items))
    there = {key: content(700, number) for number, key in enumerate(keys) if number % 2}
    peer = await trial.connect()
    if there:
        await trial.store(peer, there.items())
    await trial.expect_objects(peer, [(key, there.get(key)) for key in keys])


@READING.clause("5.4-empty")
async def empty(trial: Trial) -> None:
    """An object of 0 bytes is an object: OK, no bytes, and the checksum of nothing."""
    keys = trial.keys(min(3, trial.limits.max_items))
    peer = await trial.connect()
    await trial.store(peer, [(key, b"") for key in keys])
    expect("EXIST of empty objects", [OK] * len(keys), await trial.exist(peer, keys))
    answer = await peer.call(Read(namespace=trial.namespace, keys=keys, capacities=(0,) * len(keys)))
    expect("READ of empty objects", [b""] * len(keys), answer.objects())


@READING.clause("5.4-too-large")
async def too_large(trial: Trial) -> None:
    """An object larger than its capacity is TOO_LARGE, with its size and without bytes."""
    (key,) = trial.keys(1)
    size = min(1000, trial.largest_bytes)
    data = content(size)
    peer = await trial.connect()
    await trial.store(peer, [(key, data)])
    for capacity in (size - 1, 0):
        answer = await peer.call(Read(namespace=trial.namespace, keys=(key,), capacities=(capacity,)))
        expect(f"READ of {size} bytes into {capacity}", [TOO_LARGE], answer.statuses)
        expect("the size that goes with TOO_LARGE", size, answer.items[0].object_bytes)
        expect("bytes that come with TOO_LARGE", 0, sum(map(len, answer.received.values())))
    expect("READ into exactly enough memory", [data], await trial.read(peer, [key], capacity=size))


@READING.clause("5.4-small-frames")
async def small_frames(trial: Trial) -> None:
    """An object that does not fit the client's frames comes in several, and is whole."""
    size = min(10_000, trial.largest_bytes)
    objects = [(key, content(size - number, number)) for number, key in enumerate(trial.keys(3))]
    peer = await trial.connect(max_payload_bytes=1024)
    await trial.store(peer, objects[:1])
    await trial.store(peer, objects[1:])
    await trial.expect_objects(peer, objects)


@READING.clause("5.4-many")
async def many(trial: Trial) -> None:
    """Hundreds of objects of different sizes come in one READ, each in its place."""
    count = min(300, trial.limits.max_items)
    sizes = [(number * 97) % 2000 for number in range(count)]
    sizes = [min(size, trial.largest_bytes, trial.limits.max_inflight_bytes // 2 // count) for size in sizes]
    pairs = zip(trial.keys(count), sizes, strict=True)
    objects = [(key, content(size, number)) for number, (key, size) in enumerate(pairs)]
    peer = await trial.connect()
    await trial.store(peer, objects)
    await trial.expect_objects(peer, objects)
