"""Runs inside the engine's process: real vLLM, told what to do by JSON lines on stdin, answering on stdout.

vLLM runs in-process (one process, its scheduler and its worker in reach), so that the demo can look at the
engine's own memory: `record` writes down the bytes of every cached block straight from the KV cache tensors,
without passing through anything of ours. Nothing of vLLM is patched.

    {"do": "generate", "name": str, "prompt": [int], "max_tokens": int}
        -> {"tokens": [int], "logprobs": [float], "cached_tokens": int, "ttft_seconds": float}
    {"do": "record", "folder": str}
        -> {"blocks": int}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from demo import pages

# Before vLLM is imported: one process, small, quiet, offline.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class Engine:
    """One in-process vLLM engine."""

    def __init__(self, options: argparse.Namespace) -> None:
        from vllm import LLM

        transfer = json.loads(options.kv_transfer_config) if options.kv_transfer_config else None
        self._engine: Any = LLM(
            model=options.model,
            kv_transfer_config=transfer,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",  # bfloat16 would round away the difference between right and nearly right
            distributed_executor_backend="uni",
            max_model_len=options.max_model_len,
            num_gpu_blocks_override=options.blocks,
            max_num_seqs=4,
            disable_log_stats=True,
            seed=0,
        ).llm_engine
        self._core: Any = self._engine.engine_core.engine_core
        self._recorded: set[bytes] = set()

    def generate(self, name: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Run one request to its end. The clock starts when the engine gets the request."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, detokenize=False
        )
        began = time.perf_counter()
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), sampling)
        ttft_seconds: float | None = None
        while True:
            for output in self._engine.step():
                completion = output.outputs[0]
                if ttft_seconds is None and completion.token_ids:
                    ttft_seconds = time.perf_counter() - began
                if output.finished:
                    return {
                        "tokens": list(completion.token_ids),
                        "logprobs": [
                            step[token].logprob
                            for token, step in zip(completion.token_ids, completion.logprobs, strict=True)
                        ],
                        "cached_tokens": output.num_cached_tokens,
                        "ttft_seconds": ttft_seconds,
                    }

    def record(self, folder: Path) -> int:
        """Append every cached block that was not recorded yet; return how many there were."""
        added = 0
        for block in self._cached_blocks():
            pages.append(folder, block)
            added += 1
        return added

    def _cached_blocks(self) -> Iterator[pages.RecordedBlock]:
        scheduler = self._core.scheduler
        layers = scheduler.vllm_config.compilation_config.static_forward_context
        config = scheduler.kv_cache_config
        known = scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        for key, held in list(known.items()):
            if bytes(key) in self._recorded:
                continue
            self._recorded.add(bytes(key))
            block_id = (next(iter(held.values())) if isinstance(held, dict) else held).block_id
            group = int.from_bytes(key[-4:], "big")
            yield pages.RecordedBlock(
                block_hash=bytes(key[:-4]),
                group=group,
                pages={
                    name: page_bytes(layers[name].kv_cache, config.num_blocks, block_id)
                    for name in config.kv_cache_groups[group].layer_names
                },
            )

    @property
    def namespace(self) -> bytes:
        """Where the adapter keeps this engine's objects; empty without one."""
        connector = self._core.scheduler.connector
        return b"" if connector is None else bytes(connector.connector_scheduler.manager.namespace)

    @property
    def block_size(self) -> int:
        """Tokens in one block."""
        return int(self._core.scheduler.block_size)


def page_bytes(cache: Any, num_blocks: int, block_id: int) -> bytes:
    """The bytes of one block in one layer's tensor, as they lie in memory (dimensions may be permuted)."""
    import torch

    (tensor,) = cache if isinstance(cache, (list, tuple)) else (cache,)
    per_block = tensor.shape[0] // num_blocks  # the kernel's blocks may be smaller than the manager's
    block = tensor[block_id * per_block : (block_id + 1) * per_block]
    length = block.numel() * block.element_size()
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = block.storage_offset() * block.element_size()
    extent = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True)) + 1
    if extent * block.element_size() != length:
        raise RuntimeError(
            f"block {block_id} is not one piece of memory: shape {block.shape}, {block.stride()}"
        )
    return bytes(raw[start : start + length].numpy())


def serve(options: argparse.Namespace) -> None:
    """Start the engine, then obey stdin until it ends."""
    # vLLM and its libraries print to stdout; the answers go to the real one, everything else to the log.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    import vllm

    engine = Engine(options)
    answer({"vllm": vllm.__version__, "block_size": engine.block_size, "namespace": engine.namespace.hex()})
    for line in sys.stdin:
        request = json.loads(line)
        match request.pop("do"):
            case "generate":
                answer(engine.generate(**request))
            case "record":
                answer({"blocks": engine.record(Path(request["folder"]))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--kv-transfer-config")
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    serve(parser.parse_args())


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main()
