"""The story the demo tells, step by step.

Several agents with long, different histories share an engine whose cache holds about half of them.

1. Without ADP: each agent speaks (turn one) and comes back at once (turn two, a hit in the engine's own
   cache); then turn two of every agent again, by now evicted and computed from nothing. This gives the right
   outputs, for the very same split of work and for a full recomputation, and the time to beat.
2. With ADP: turn one of every agent; the driver writes down the pages in the engine's memory; when the
   gateway has them all, the engine is killed with SIGKILL.
3. Every recorded page is read back from the gateway and compared, byte for byte.
4. A new engine: turn two of every agent must be restored and must say what the engine without ADP said.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import anyio
import attrs

from adp_client import Client, ClientConfig, ObjectKey
from demo import pages
from demo.processes import EngineProcess, Generated, run_engine, run_gateway
from demo.report import Report

MODEL_CONFIG = Path(__file__).parent / "model" / "config.json"
SEED = 7
ANSWER_TOKENS = 16
QUESTION_TOKENS = 32
WARM_UP_TOKENS = 100  # less than a block: nothing of it is cached or stored
CACHE_SHARE = 0.6  # of all agents' histories, what the engine's own cache can hold
STORED_WITHIN_SECONDS = 60.0
# A recomputation splits the work differently than a hit, so its float32 sums may differ in the last digits.
LOGPROB_TOLERANCE = 1e-4


@attrs.frozen(kw_only=True)
class Settings:
    """What the user can choose."""

    agents: int = attrs.field(default=4, validator=attrs.validators.ge(2))
    history_blocks: int = attrs.field(default=23, validator=attrs.validators.ge(1))
    block_tokens: int = 128  # vLLM's own default on a CPU; checked against the running engine

    @property
    def history_tokens(self) -> int:
        # Not a whole number of blocks, and room for the answer: no block ever holds a generated token, so
        # every cached block is one that the adapter stores.
        return self.history_blocks * self.block_tokens + self.block_tokens // 4

    @property
    def restorable_tokens(self) -> int:
        """Of one agent's history, what lies in whole blocks."""
        return self.history_blocks * self.block_tokens

    @property
    def max_model_len(self) -> int:
        return (self.history_blocks + 3) * self.block_tokens

    @property
    def cache_blocks(self) -> int:
        wanted = int(self.agents * (self.history_blocks + 1) * CACHE_SHARE)
        return max(wanted, self.max_model_len // self.block_tokens + 1)


@attrs.define
class Narrator:
    """Progress lines with the seconds since the start."""

    write: Callable[[str], object] = print
    _began: float = attrs.field(factory=time.monotonic)

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self.write(f"[{self.elapsed_seconds:6.1f} s] {text}")


@attrs.frozen(kw_only=True)
class Baseline:
    """What the engine says without ADP, agent by agent."""

    first: list[Generated]
    second_hit: list[Generated]
    second_cold: list[Generated]
    returning: list[list[int]]  # turn two's prompts


async def run(settings: Settings, *, folder: Path, narrator: Narrator) -> Report:
    """Play the whole story; logs, pages and data stay in `folder`. Raises ProcessDied, TimeoutError."""
    from demo.weights import write_model  # needs torch; the judging below does not

    say = narrator.say
    model = folder / "model"
    say("writing a small model with random weights")
    write_model(MODEL_CONFIG, model, SEED)
    vocabulary = int(json.loads(MODEL_CONFIG.read_text())["vocab_size"])
    histories = make_histories(settings, vocabulary)
    say(
        f"{settings.agents} agents with {settings.history_tokens:,} tokens of history each; "
        f"the engine's cache holds {settings.cache_blocks * settings.block_tokens:,} tokens"
    )

    def engine(name: str, endpoint: str | None) -> AbstractAsyncContextManager[EngineProcess]:
        return run_engine(
            model=model,
            transfer=transfer_config(endpoint) if endpoint else None,
            blocks=settings.cache_blocks,
            max_model_len=settings.max_model_len,
            log=folder / f"{name}.log",
        )

    say("starting vLLM without ADP")
    async with engine("engine-without-adp", None) as without:
        await get_ready(without, settings, narrator)
        baseline = await run_baseline(without, histories, vocabulary, narrator)

    # A socket's path must be short, so it does not live in `folder`.
    with tempfile.TemporaryDirectory(prefix="adp-") as sockets:
        say("starting the gateway on an empty directory")
        async with (
            run_gateway(
                data=folder / "gateway", endpoint=f"unix://{sockets}/gateway.sock", log=folder / "gateway.log"
            ) as endpoint,
            Client(ClientConfig(endpoint=endpoint)) as client,
        ):
            recorded = folder / "pages"
            recorded.mkdir()
            say("starting vLLM with ADP")
            async with engine("engine-1", endpoint) as one:
                await get_ready(one, settings, narrator)
                first = await store(one, client, histories, recorded, narrator)
                say("killing the engine with SIGKILL")
                await one.kill()
            compared, identical = await compare_pages(client, one.namespace, recorded)
            say(f"read back {compared:,} pages from the gateway; {identical:,} are what the engine held")
            say("starting vLLM again")
            async with engine("engine-2", endpoint) as two:
                await get_ready(two, settings, narrator)
                second = await restore(two, baseline.returning, narrator)
            say("stopping the gateway")

    return Report(
        vllm=two.vllm,
        agents=settings.agents,
        prompt_tokens=sum(map(len, baseline.returning)),
        restored_tokens=sum(one.cached_tokens for one in second),
        restorable_tokens=settings.agents * settings.restorable_tokens,
        pages_compared=compared,
        pages_identical=identical,
        outputs_identical=outputs_identical(baseline, first, second),
        recompute_cached_tokens=sum(one.cached_tokens for one in baseline.second_cold),
        ttft_recompute_s=median_ttft(baseline.second_cold),
        ttft_restore_s=median_ttft(second),
        elapsed_s=round(narrator.elapsed_seconds, 1),
    )


def transfer_config(endpoint: str) -> dict[str, object]:
    """What a user writes after `vllm serve ... --kv-transfer-config`."""
    return {
        "kv_connector": "ADPOffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "ADPOffloadingSpec",
            "adp": {"endpoint": endpoint},
        },
    }


def make_histories(settings: Settings, vocabulary: int) -> list[list[int]]:
    """One long prompt for each agent, different from its first token on."""
    return [
        random_tokens(f"history {agent}", settings.history_tokens, vocabulary)
        for agent in range(settings.agents)
    ]


def random_tokens(seed: str, count: int, vocabulary: int) -> list[int]:
    """The same tokens for the same seed, in every process and on every machine."""
    random = Random(seed)
    return [random.randrange(vocabulary) for _ in range(count)]


async def get_ready(engine: EngineProcess, settings: Settings, narrator: Narrator) -> None:
    """One short request, so that compiling kernels is nobody's time to first token."""
    if engine.block_size != settings.block_tokens:
        raise RuntimeError(
            f"vLLM uses blocks of {engine.block_size} tokens; the demo expects {settings.block_tokens}"
        )
    await engine.generate("warm-up", list(range(WARM_UP_TOKENS)), max_tokens=2)
    narrator.say(f"the engine is up: vLLM {engine.vllm}, process {engine.pid}")


async def run_baseline(
    engine: EngineProcess, histories: Sequence[list[int]], vocabulary: int, narrator: Narrator
) -> Baseline:
    """Step 1 of the story."""
    first, second_hit, second_cold, returning = [], [], [], []
    for agent, history in enumerate(histories):
        answer = await engine.generate(f"{agent} turn 1", history, max_tokens=ANSWER_TOKENS)
        prompt = history + answer.tokens + random_tokens(f"question {agent}", QUESTION_TOKENS, vocabulary)
        first.append(answer)
        returning.append(prompt)
        second_hit.append(await engine.generate(f"{agent} turn 2", prompt, max_tokens=ANSWER_TOKENS))
    for agent, prompt in enumerate(returning):
        second_cold.append(await engine.generate(f"{agent} returns", prompt, max_tokens=ANSWER_TOKENS))
        narrator.say(f"agent {agent} returns, recomputed: first token after {in_ms(second_cold[-1])}")
    return Baseline(first=first, second_hit=second_hit, second_cold=second_cold, returning=returning)


async def store(
    engine: EngineProcess, client: Client, histories: Sequence[list[int]], recorded: Path, narrator: Narrator
) -> list[Generated]:
    """Step 2, up to the kill: returns when the gateway holds every block that was recorded."""
    answers = []
    for agent, history in enumerate(histories):
        answers.append(await engine.generate(f"{agent} turn 1", history, max_tokens=ANSWER_TOKENS))
        blocks = await engine.record(recorded)
        narrator.say(
            f"agent {agent} spoke: {len(history):,} tokens; recorded {blocks} blocks of the engine's memory"
        )
    keys = [key_of(block) for block in pages.load(recorded)]
    with anyio.fail_after(STORED_WITHIN_SECONDS):
        while (present := (await client.exist(engine.namespace, keys)).count_ok) < len(keys):
            narrator.say(f"the gateway has {present} of {len(keys)} blocks")
            await anyio.sleep(0.5)
    narrator.say(f"the gateway has all {len(keys)} blocks")
    return answers


def key_of(block: pages.RecordedBlock) -> bytes:
    return ObjectKey(block_hash=block.block_hash, group=block.group).to_bytes()


async def compare_pages(client: Client, namespace: bytes, recorded: Path) -> tuple[int, int]:
    """Step 3: how many pages were compared (a missing one counts), and how many of them are identical."""
    compared = identical = 0
    for block in pages.load(recorded):
        buffer = bytearray(block.length_bytes)
        result = await client.read(namespace, [key_of(block)], [buffer])
        whole = result.count_ok == 1 and result.lengths[0] == len(buffer)
        offset = 0
        for page in block.pages.values():
            compared += 1
            identical += whole and buffer[offset : offset + len(page)] == page
            offset += len(page)
    return compared, identical


async def restore(
    engine: EngineProcess, returning: Sequence[list[int]], narrator: Narrator
) -> list[Generated]:
    """Step 4."""
    outputs = []
    for agent, prompt in enumerate(returning):
        output = await engine.generate(f"{agent} returns", prompt, max_tokens=ANSWER_TOKENS)
        narrator.say(
            f"agent {agent} returns, {output.cached_tokens:,} tokens restored: "
            f"first token after {in_ms(output)}"
        )
        outputs.append(output)
    return outputs


def outputs_identical(baseline: Baseline, first: Sequence[Generated], second: Sequence[Generated]) -> bool:
    """Whether ADP changed nothing.

    Against the run that split the work in the same way, tokens and log-probabilities must be equal to the
    last bit; against a full recomputation, tokens must be equal and log-probabilities as close as float32
    sums allow.
    """
    same_split = zip([*baseline.first, *baseline.second_hit], [*first, *second], strict=True)
    return all(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in same_split) and all(
        a.tokens == b.tokens
        and all(abs(x - y) <= LOGPROB_TOLERANCE for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in zip(baseline.second_cold, second, strict=True)
    )


def median_ttft(outputs: Sequence[Generated]) -> float:
    """Seconds, to a tenth of a millisecond."""
    return round(statistics.median(output.ttft_seconds for output in outputs), 4)


def in_ms(output: Generated) -> str:
    return f"{output.ttft_seconds * 1000:,.0f} ms"
