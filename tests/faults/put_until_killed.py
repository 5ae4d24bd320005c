"""A gateway's storage half in a process of its own: puts and deletes for ever, and says what is acknowledged.

    python put_until_killed.py DIRECTORY FIRST

Each line is an acknowledged `put N` or `delete N`; object N is a function of N (`gateway.objects.payload`).
`deleting N` comes before the delete: after a kill behind it the object may be there or not.
"""

import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import anyio

from adp_gateway.store.segments import SegmentStore
from gateway.objects import NAMESPACE, config, item, key, payload

SIZES = [1, 5000, 60_000, 200_000]


def contents(n: int) -> bytes:
    return payload(n, SIZES[n % len(SIZES)])


async def main(directory: Path, first: int) -> None:
    async with SegmentStore.open(config(directory)) as store:
        for n in itertools.count(first, 4):
            items = [item(key(m), contents(m)) for m in range(n, n + 4)]
            assert not any(await store.put_many(NAMESPACE, items))
            print(*(f"put {m}" for m in range(n, n + 4)), sep="\n", flush=True)
            if n % 3 == 0:
                print(f"deleting {n + 1}", flush=True)
                await store.delete_many(NAMESPACE, [key(n + 1)])
                print(f"delete {n + 1}", flush=True)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
