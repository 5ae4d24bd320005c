"""The processes of an end-to-end test: real engines and a real gateway, killed and started again."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SERVED = Path(__file__).with_name("served.py")
START_SECONDS = 300.0


class Engine:
    """One real vLLM engine (`served.py`). `adp` is what a user writes under "adp"; None: no connector."""

    def __init__(self, model: Path, log: Path, *, adp: dict[str, Any] | None, **settings: Any) -> None:
        self.log = log
        settings = {"max_model_len": 1280, "num_gpu_blocks_override": 64, **settings}
        if adp is not None:
            settings["kv_transfer_config"] = transfer_config(adp)
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVED), json.dumps({"model": str(model), **settings})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                text=True,
                start_new_session=True,
            )
        self.groups = self._answer()["ready"]

    def do(self, what: str, **arguments: Any) -> Any:
        """Run one command of `served.Engine`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def generate(self, *prompts: list[int]) -> list[dict[str, Any]]:
        """One prompt after the other: what runs together is rounded together, and outputs could not be
        compared."""
        return [self.do("generate", prompts=[prompt])[0] for prompt in prompts]

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._process.kill()
        self._process.wait(60)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def lines(self, word: str) -> list[str]:
        """Lines of the log that contain `word`."""
        return [line for line in self.log.read_text().splitlines() if word in line]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.kill()
            tail = "\n".join(self.log.read_text().splitlines()[-40:])
            raise AssertionError(f"the engine ended with status {self._process.returncode}:\n{tail}")
        return json.loads(line)


class Gateway:
    """A real gateway on a port of its own; start and stop it at will."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._log = data.with_suffix(".log")
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *options: str) -> "Gateway":
        """Returns when clients can connect."""
        with self._log.open("a") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "adp_gateway", "serve", "--data", str(self._data)),
                    *("--listen", self.endpoint, *options),
                ],
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(),
                text=True,
            )
        assert self._process.stdout is not None
        assert self._process.stdout.readline().startswith("ready "), self._log.read_text()[-2000:]
        return self

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


def free_port() -> int:
    """A port that is free now, and that no outgoing connection will be given while nobody listens on it."""
    for _ in range(100):
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


def transfer_config(adp: Any, **extra: Any) -> dict[str, Any]:
    """The `--kv-transfer-config` JSON that selects the adapter: names, no module paths."""
    return {
        "kv_connector": "ADPOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"adp": adp, **extra},
    }


def environment() -> dict[str, str]:
    """The environment of a user who sets nothing special; offline, small, and without a hash seed."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    return {
        **kept,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Poll for what another process does, up to a deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def prompt(seed: int, tokens: int = 900) -> list[int]:
    """Tokens that share no prefix with those of another seed."""
    return [(i * 7 + 3 + 131 * seed * (i + 1) ** 2) % 1000 for i in range(tokens)]
