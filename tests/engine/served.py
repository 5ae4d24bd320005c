"""One real vLLM engine in a process of its own, driven by lines of JSON: commands in, answers out.

Run by `engines.EngineProcess` with the interpreter of a vLLM environment; not a test by itself. Everything
that a check wants to know of the inside of the engine is a command here, so that one start (17 seconds)
serves many checks.
"""

import json
import os
import signal
import sys
from typing import Any

import attrs


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints is log, not a reply

    def reply(value: Any) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    from vllm import LLM

    llm = LLM(
        settings.pop("model"),
        skip_tokenizer_init=True,
        enforce_eager=True,
        seed=0,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        **settings,
    )
    engine = Engine(llm)
    reply({"ready": engine.groups()})
    for line in sys.stdin:
        command = json.loads(line)
        reply(getattr(engine, command.pop("do"))(**command))


class Engine:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.llm_engine.engine_core.engine_core

    def groups(self) -> list[list[Any]]:
        return [
            [type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, len(group.layer_names)]
            for group in self._core.scheduler.kv_cache_config.kv_cache_groups
        ]

    @property
    def _manager(self) -> Any:
        return self._core.scheduler.connector.connector_scheduler.manager

    @property
    def _worker(self) -> Any:
        from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

        return get_kv_transfer_group().connector_worker.worker

    def is_connected(self) -> bool:
        """Whether both halves have a link."""
        return self._manager._bridge.is_connected and self._worker.transfers._bridge.is_connected

    def generate(self, prompts: list[list[int]], max_tokens: int = 8) -> list[dict[str, Any]]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        parameters = SamplingParams(
            temperature=0, max_tokens=max_tokens, detokenize=False, ignore_eos=True, logprobs=0
        )
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], parameters, use_tqdm=False
        )
        return [self._describe(output) for output in outputs]

    def _describe(self, output: Any) -> dict[str, Any]:
        return {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [next(iter(at.values())).logprob for at in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
            "finish": output.outputs[0].finish_reason,
        }

    def generate_killing(self, prompt: list[int], pid: int) -> dict[str, Any]:
        """Run one prompt; SIGKILL `pid` when its lookups were answered and the reads are about to be sent."""
        manager = self._manager
        fetch = manager._fetch
        wanted: list[int] = []

        def kill_and_fetch(entries: Any) -> None:
            os.kill(pid, signal.SIGKILL)
            wanted.append(len(entries))
            fetch(entries)

        manager._fetch = kill_and_fetch
        (output,) = self.generate([prompt])
        del manager._fetch
        return {**output, "wanted": sum(wanted)}

    def generate_breaking_load(self, prompt: list[int]) -> dict[str, Any]:
        """Run one prompt whose restore fails after the engine was told of the hit: its staging cannot be
        mapped."""
        manager = self._manager
        self.generate([prompt])
        self.settle()
        self.forget_local()
        prepare_load = manager.prepare_load

        def prepare_unmappable(keys: Any, req_context: Any) -> Any:
            source = prepare_load(keys, req_context)
            source.region = attrs.evolve(source.region, path="/proc/self/fd/99999")
            return source

        manager.prepare_load = prepare_unmappable
        (output,) = self.generate([prompt])
        del manager.prepare_load
        return output

    def forget_local(self) -> bool:
        """Empty the engine's own prefix cache; what is stored elsewhere stays."""
        return bool(self._llm.reset_prefix_cache())

    def reset_all(self) -> bool:
        return bool(self._core.reset_prefix_cache(reset_running_requests=False, reset_connector=True))

    def settle(self) -> bool:
        """Step until every store has been answered."""
        while self._core.scheduler.has_requests() or self._core.scheduler.connector.has_pending_push_work():
            self._llm.llm_engine.step()
        return True

    def counters(self) -> dict[str, int]:
        return {**self._manager.counters, **attrs.asdict(self._worker.transfers.counters)}

    def namespace(self) -> str:
        return str(self._manager.namespace.hex())

    def shutdown(self) -> bool:
        self._core.shutdown()
        return True


if __name__ == "__main__":
    main()
