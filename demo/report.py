"""What the demo found, as a table for people and as JSON for programs."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Report:
    """The outcome. Tokens and pages are summed over all agents; times are medians over them, in seconds."""

    vllm: str
    agents: int
    prompt_tokens: int
    restored_tokens: int
    restorable_tokens: int
    pages_compared: int
    pages_identical: int
    outputs_identical: bool
    recompute_cached_tokens: int
    ttft_recompute_s: float
    ttft_restore_s: float
    elapsed_s: float

    @property
    def problems(self) -> list[str]:
        """Why this is a FAIL; empty means PASS."""
        found = []
        if self.pages_compared == 0:
            found.append("no page was compared")
        if self.pages_identical != self.pages_compared:
            found.append(f"{self.pages_compared - self.pages_identical} pages differ or are missing")
        if self.restored_tokens != self.restorable_tokens:
            found.append(f"{self.restored_tokens} of {self.restorable_tokens} restorable tokens came back")
        if not self.outputs_identical:
            found.append("outputs differ from the run without ADP")
        if self.recompute_cached_tokens:
            found.append(f"nothing was recomputed: {self.recompute_cached_tokens} tokens were still cached")
        return found

    @property
    def passed(self) -> bool:
        """Whether every page and every output is right and everything restorable came back."""
        return not self.problems

    def to_json(self) -> dict[str, object]:
        """All fields and the verdict."""
        return {**attrs.asdict(self), "passed": self.passed, "problems": self.problems}

    def to_table(self) -> str:
        """The table that ends the demo."""
        speedup = self.ttft_recompute_s / self.ttft_restore_s
        rows = [
            ("vLLM", self.vllm),
            ("agents", f"{self.agents}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("tokens restored", f"{self.restored_tokens:,} of {self.restorable_tokens:,} in whole blocks"),
            ("pages compared", f"{self.pages_compared:,}"),
            ("pages identical", f"{self.pages_identical:,}"),
            ("outputs identical", "yes" if self.outputs_identical else "NO"),
            ("first token, recomputed", f"{self.ttft_recompute_s * 1000:,.0f} ms"),
            ("first token, restored", f"{self.ttft_restore_s * 1000:,.0f} ms ({speedup:.1f} times as fast)"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"  {name.ljust(width)}   {value}" for name, value in rows]
        lines += [f"  problem: {problem}" for problem in self.problems]
        return "\n".join([*lines, "", "PASS" if self.passed else "FAIL"])
