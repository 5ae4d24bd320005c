"""`python -m bench`, run by `nox -s bench`: a real gateway process, both sides of every row in one run."""

from __future__ import annotations

import argparse
import functools
import json
import socket
import sys
import tempfile
from pathlib import Path

import anyio

from adp_client import Client, ClientConfig
from bench.device import measure_device
from bench.exists import measure_exists
from bench.index import measure_memory, measure_reopen
from bench.machine import describe
from bench.queueing import measure_queueing
from bench.reads import measure_reads
from bench.report import Row, to_table, worst, worst_of_each
from bench.shared import measure_shared
from bench.values import measure_values
from demo.processes import run_gateway

DEVICE_SAMPLES = 25  # of 256 MiB: enough for a median, and minutes rather than an hour
RESULTS = Path(__file__).parent / "results" / "latest.json"


async def measure(folder: Path, *, samples: int) -> list[Row]:
    """Every row. `folder` takes the gateway's data and the reference's files, on one file system."""
    throughput: list[Row] = []
    cpu: list[Row] = []
    exists: list[Row] = []
    shared: list[Row] = []
    values: list[Row] = []
    queueing: list[Row] = []
    endpoints = {
        "unix": (socket.AF_UNIX, f"unix://{folder}/gateway.sock"),
        "tcp": (socket.AF_INET, "tcp://127.0.0.1:0"),
    }
    for transport, (family, wanted) in endpoints.items():
        data = folder / f"data-{transport}"
        async with (
            run_gateway(data=data, endpoint=wanted, log=folder / f"{transport}.log") as endpoint,
            Client(ClientConfig(endpoint=endpoint)) as client,
        ):
            print(f"reads over {transport} ...", flush=True)
            rows = await measure_reads(
                client, transport=transport, family=family, folder=folder, samples=samples
            )
            throughput += rows.throughput
            cpu += rows.cpu
            if transport == "unix":
                print("EXIST ...", flush=True)
                exists = await measure_exists(client, folder=folder, samples=samples)
                print("reads into shared memory ...", flush=True)
                shared = await measure_shared(client, folder=folder, samples=samples)
                print("reads beside Redis ...", flush=True)
                values = await measure_values(client, folder=folder, samples=samples)
                print("reads while writes are queued ...", flush=True)
                queueing = [await measure_queueing(client, samples=4 * samples)]
    print("a million objects ...", flush=True)
    path = folder / "million.sock"
    async with (
        run_gateway(
            data=folder / "data-million", endpoint=f"unix://{path}", log=folder / "million.log"
        ) as endpoint,
        Client(ClientConfig(endpoint=endpoint)) as client,
    ):
        index = [await measure_memory(client, path=path)]
    index.append(measure_reopen(folder))
    print("the device ...", flush=True)
    device = await measure_device(folder, samples=min(samples, DEVICE_SAMPLES))
    return [
        worst("socket_read_vs_sendfile", throughput),
        *throughput,
        worst("shm_read_vs_preadv", shared),
        *shared,
        *worst_of_each(values),
        *values,
        *queueing,
        *exists,
        *index,
        *device,
        max(
            (row for row in cpu if row.name.startswith("client_cpu") and row.name.endswith("/256k")),
            key=lambda row: row.ours,
        ).renamed("client_cpu_us_per_page"),
        *cpu,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="nox -s bench --")
    parser.add_argument("--samples", type=int, default=101, help="measurements of each side (default 101)")
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"where the JSON goes (default {RESULTS})")
    parser.add_argument(
        "--data", type=Path, help="a folder for the data (default: the system's temporary one)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adp-bench-", dir=options.data) as name:
        folder = Path(name)
        machine = describe(folder)
        rows = anyio.run(functools.partial(measure, folder, samples=options.samples))
    result = {"machine": machine, "rows": [row.to_json() for row in rows]}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print("\n" + to_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
