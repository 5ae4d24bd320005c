"""`python -m demo`, run by `nox -s demo` in vLLM's environment. Exit status: 0 PASS, 1 FAIL, 2 usage."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import anyio

from demo.processes import ProcessDied
from demo.scenario import Narrator, Settings, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="nox -s demo --", description="Restore an engine's KV cache from a gateway."
    )
    parser.add_argument("--agents", type=int, default=4, help="how many agents share the engine (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep logs, pages and the gateway's data in DIR"
    )
    parser.add_argument("--vllm", metavar="VERSION", help="the engine's version (handled by nox)")
    options = parser.parse_args()
    if options.agents < 2:
        parser.error("--agents: at least 2 are needed to fight over the engine's cache")

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the progress lines are ours
    folder = options.keep or Path(tempfile.mkdtemp(prefix="adp-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--keep: {folder} is not empty")
    narrator = Narrator(write=functools.partial(print, flush=True))
    try:
        report = anyio.run(
            functools.partial(run, Settings(agents=options.agents), folder=folder, narrator=narrator)
        )
    except (ProcessDied, TimeoutError) as error:
        narrator.say(str(error) or type(error).__name__)
        print(f"\nFAIL: the story did not reach its end. Logs: {folder}")
        return 1
    print("\n" + report.to_table())
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if not report.passed:
        print(f"Logs: {folder}")
    elif options.keep is None:
        shutil.rmtree(folder)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
