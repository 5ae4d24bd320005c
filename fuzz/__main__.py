"""Run targets under atheris: `python -m fuzz [TARGET ...] [--seconds N]`.

Exit status: 0 nothing found, 1 a finding (its input is kept in fuzz/findings/), 2 bad usage.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from .seeds import ROOT, corpus, seeds
from .targets import TARGETS


def _run_one(name: str, seconds: int) -> None:
    """In its own process: atheris never returns. Instrumentation happens at import, so import late."""
    import atheris

    for module in [m for m in sys.modules if m.startswith(("adp_client", "fuzz.targets"))]:
        del sys.modules[module]
    with atheris.instrument_imports(include=["adp_client"]):
        from .targets import TARGETS as INSTRUMENTED

    findings = ROOT / "findings" / name
    findings.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for index, seed in enumerate([*seeds(), *corpus(name)]):
            (Path(folder) / f"{index:05}").write_bytes(seed)
        words = [sys.argv[0], folder, f"-max_total_time={seconds}", "-max_len=4096", "-timeout=5"]
        words += ["-rss_limit_mb=1024", f"-artifact_prefix={findings}/", "-print_final_stats=1"]
        atheris.Setup(words, INSTRUMENTED[name])
        atheris.Fuzz()


def main() -> int:
    """Run each target for its time, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default all: {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="a target (default 60)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    unknown = [name for name in chosen.targets if name not in TARGETS]
    if unknown:
        parser.error(f"unknown target {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    if chosen.here:
        _run_one(chosen.targets[0], chosen.seconds)
        return 0
    status = 0
    for name in chosen.targets or TARGETS:
        print(f"fuzzing {name} for {chosen.seconds} s", flush=True)
        command = [sys.executable, "-m", "fuzz", name, "--seconds", str(chosen.seconds), "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        stats = [line for line in done.stderr.splitlines() if line.startswith("stat::")]
        print("\n".join(stats[:3]) if done.returncode == 0 else done.stderr[-4000:], flush=True)
        status = status or int(done.returncode != 0)
    return status


if __name__ == "__main__":
    sys.exit(main())
