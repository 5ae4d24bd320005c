"""Coverage-guided runs with atheris, one process for each target, one after the other."""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from .dictionaries import dictionary_of
from .seeds import GROWN, ROOT, corpus, seeds

MAX_INPUT_BYTES = 4096
INSTRUMENTED = ("adp_client", "adp_gateway", "adp_engines")


@attrs.frozen(kw_only=True)
class Run:
    """How one target's run went."""

    target: str
    executions: int
    per_second: int
    is_clean: bool
    log: str


def fuzz_here(name: str, seconds: int) -> None:
    """In a process of its own: atheris never returns. Instrumentation happens at import, so import late."""
    import atheris

    for module in [m for m in sys.modules if m.partition(".")[0] in (*INSTRUMENTED, "fuzz")]:
        del sys.modules[module]
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        from .targets import TARGETS

    findings, grown = ROOT / "findings" / name, GROWN / name
    findings.mkdir(parents=True, exist_ok=True)
    grown.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate([*seeds(name), *corpus(name)]):
            (Path(folder) / f"{index:05}").write_bytes(seed)
        words = [sys.argv[0], str(grown), folder, f"-max_total_time={seconds}", f"-max_len={MAX_INPUT_BYTES}"]
        words += ["-timeout=10", "-rss_limit_mb=1024", "-print_final_stats=1", f"-dict={dictionary_of(name)}"]
        words += [f"-artifact_prefix={findings}{os.sep}"]
        atheris.Setup(words, TARGETS[name])
        atheris.Fuzz()


def fuzz(targets: Sequence[str], seconds: int) -> int:
    """Fuzz each for `seconds`; a table at the end. 1 if anything was found."""
    runs = []
    for name in targets:
        print(f"fuzzing {name} for {seconds} s", flush=True)
        command = [sys.executable, "-m", "fuzz", name, "--seconds", str(seconds), "--here"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        stats = dict(re.findall(r"^stat::(\w+):\s*(\d+)", done.stderr, flags=re.MULTILINE))
        runs.append(
            Run(
                target=name,
                executions=int(stats.get("number_of_executed_units", 0)),
                per_second=int(stats.get("average_exec_per_sec", 0)),
                is_clean=done.returncode == 0,
                log=done.stdout[-2000:] + done.stderr[-4000:],
            )
        )
        if not runs[-1].is_clean:
            print(runs[-1].log, flush=True)
    print("\n".join(table(runs)), flush=True)
    return int(not all(run.is_clean for run in runs))


def table(runs: Sequence[Run]) -> list[str]:
    """Lines: one for each target."""
    lines = [f"{'target':16} {'executions':>12} {'per second':>12}  result"]
    for run in runs:
        result = "nothing found" if run.is_clean else f"FOUND: see {ROOT.name}/findings/{run.target}/"
        lines.append(f"{run.target:16} {run.executions:12,} {run.per_second:12,}  {result}")
    return lines


def minimise(targets: Sequence[str]) -> None:
    """Make `corpus/TARGET` of what it is now and what has grown: the smallest inputs that still reach all."""
    from .targets import TARGETS

    for name in targets:
        folder = ROOT / "corpus" / name
        kept = {path.read_bytes() for path in folder.glob("finding-*")}  # named by hand, and kept for ever
        inputs = {*corpus(name), *(path.read_bytes() for path in (GROWN / name).glob("*"))}
        seen: set[object] = set()
        for data in [*seeds(name), *kept]:
            seen |= _reached(TARGETS[name], data)
        chosen: list[bytes] = []
        for data in sorted(inputs - kept, key=lambda data: (len(data), data)):
            new = _reached(TARGETS[name], data) - seen
            if new and len(data) <= MAX_INPUT_BYTES:
                seen |= new
                chosen.append(data)
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*"):
            if not path.name.startswith("finding-"):
                path.unlink()
        for data in chosen:
            (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
        print(f"{name}: {len(chosen)} of {len(inputs)} inputs, and {len(kept)} findings", flush=True)


def _reached(target: Callable[[bytes], None], data: bytes) -> set[object]:
    """The steps from line to line that `data` makes the packages take."""
    steps: set[object] = set()

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        code = frame.f_code
        if not any(f"{os.sep}{package}{os.sep}" in code.co_filename for package in INSTRUMENTED):
            return None
        before = 0

        def step(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal before
            if event in ("line", "exception"):
                steps.add((code.co_filename, code.co_firstlineno, before, frame.f_lineno, event))
                before = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return steps
