"""One real engine through everything that a gateway can do to it. It lives, and says what it says without
ADP."""

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from .processes import SERVED, environment, prompt, transfer_config, until

EARLY, STORED, ORPHAN, SILENT, REFUSED = (prompt(seed) for seed in range(11, 16))


@pytest.fixture(scope="module")
def truth(model, start_engine) -> dict[str, Any]:
    """What an engine without ADP says."""
    engine = start_engine(model("dense"), adp=None)
    outputs = engine.generate(EARLY, STORED, ORPHAN, SILENT, REFUSED)
    engine.kill()
    return dict(zip(["early", "stored", "orphan", "silent", "refused"], outputs, strict=True))


def same(output: dict[str, Any], truth: dict[str, Any]) -> bool:
    return (output["tokens"], output["logprobs"]) == (truth["tokens"], truth["logprobs"])


def test_engine_survives_its_gateway(model, gateway, start_engine, truth) -> None:
    """In one engine's life, because a start costs more than all of this together."""
    engine = start_engine(
        model("dense"),
        adp={
            "endpoint": gateway.endpoint,
            "staging_bytes": 64 << 20,
            "store_staging_bytes": 16 << 20,
            "lookup_seconds": 0.5,
            "load_seconds": 2,
            "store_seconds": 2,
            "absent_seconds": 0.5,
        },
    )

    # No gateway: it starts, says so once, and serves.
    (output,) = engine.generate(EARLY)
    assert same(output, truth["early"])
    engine.do("settle")
    engine.generate(EARLY)
    assert len(engine.lines("adp: no gateway at")) == 1
    assert engine.do("counters")["objects_stored"] == 0

    # It appears: it is used, without a restart.
    gateway.start()
    # Both halves of the adapter dial by themselves: what is stored before the worker's link is up is dropped.
    until(lambda: engine.do("generate", prompts=[prompt(99, 10)]) and engine.do("is_connected"))
    until(lambda: engine.do("generate", prompts=[prompt(99, 10)]) and engine.lines("adp: the gateway at"))
    (output,) = engine.generate(STORED)
    assert same(output, truth["stored"])
    engine.do("settle")
    assert engine.do("counters")["objects_stored"] == 7
    engine.do("forget_local")
    (output,) = engine.generate(STORED)
    assert (output["cached"], same(output, truth["stored"])) == (896, True)

    # It goes silent: requests wait for their deadline and no longer, and the engine goes on.
    engine.generate(SILENT)
    engine.do("settle")
    engine.do("forget_local")
    gateway.signal(signal.SIGSTOP)
    before = engine.do("counters")
    (output,) = engine.generate(SILENT)
    assert (output["cached"], same(output, truth["silent"])) == (0, True)
    after = engine.do("counters")
    assert after["misses_lookup_timeout"] + after["misses_lookup_failed"] + after[
        "misses_disconnected"
    ] > sum(before[name] for name in ("misses_lookup_timeout", "misses_lookup_failed", "misses_disconnected"))
    gateway.signal(signal.SIGCONT)
    engine.do("settle")

    # It dies between the lookup that finds a prefix and the bytes of it.
    until(lambda: engine.do("generate", prompts=[prompt(99, 10)]) and engine.do("is_connected"))
    engine.generate(ORPHAN)
    engine.do("settle")
    engine.do("forget_local")
    output = engine.do("generate_killing", prompt=ORPHAN, pid=gateway.pid)
    assert (output["wanted"], output["cached"], same(output, truth["orphan"])) == (7, 0, True)
    gateway.kill()

    # It comes back with all that it had, and refuses everything new: stores are counted, outputs are right.
    gateway.start("--max-object", "4096")
    until(lambda: engine.do("generate", prompts=[prompt(99, 10)]) and engine.do("is_connected"))
    refused_before = engine.do("counters")["stores_refused"]
    (output,) = engine.generate(REFUSED)
    engine.do("settle")
    assert same(output, truth["refused"])
    assert engine.do("counters")["stores_refused"] == refused_before + 7
    engine.do("forget_local")
    (output,) = engine.generate(REFUSED)
    assert (output["cached"], same(output, truth["refused"])) == (0, True)

    # A cache reset of the engine means other weights, as far as anybody knows: nothing from before may hit.
    namespace = engine.do("namespace")
    assert engine.do("reset_all")
    assert engine.do("namespace") != namespace
    (output,) = engine.generate(STORED)
    assert (output["cached"], same(output, truth["stored"])) == (0, True)

    # A load whose bytes cannot be had after all is computed, and the engine says so.
    gateway.kill()
    gateway.start()
    until(lambda: engine.do("generate", prompts=[prompt(99, 10)]) and engine.do("is_connected"))
    output = engine.do("generate_breaking_load", prompt=EARLY)
    assert (output["cached"], same(output, truth["early"])) == (0, True)
    assert engine.do("counters")["loads_failed"] == 7
    assert engine.lines("a restore of 7 chunks failed")
    assert engine.do("shutdown")


@pytest.mark.parametrize("style", ["LLM", "serve"])
def test_bad_config_stops_before_any_model_loads(model, style: str) -> None:
    config = transfer_config({"enpoint": "tcp://127.0.0.1:1"})
    path = str(model("dense"))
    if style == "LLM":
        command = [sys.executable, str(SERVED), json.dumps({"model": path, "kv_transfer_config": config})]
    else:
        # What `vllm serve` runs; the command itself wants a distribution of that name, not a CPU build's.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", path]
        command += ["--kv-transfer-config", json.dumps(config)]
    done = subprocess.run(
        command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "adp:" in line]
    # The server puts the name of its process in front of everything.
    assert "adp: unknown key (allowed: " in line
    assert line.endswith("@ $.adp.enpoint")
    assert "Loading weights" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
