"""The adapters see pages, groups and keys: no line of them names a model, a family or a kind of layer.

Code that names an architecture is code that the next architecture breaks. Properties are named instead: a
page that all ranks hold, a group of which a hit needs only the end, a page with one slot. Words that the
engine's own interface forces on us may stand in `_compat.py`, and nowhere else; so far there are none.
"""

import re
from pathlib import Path

import adp_engines

PACKAGE = Path(adp_engines.__file__).parent

#: Families, and kinds of layer that stand for families. Lower case; found anywhere in a word.
WORDS = (
    *(
        "llama",
        "qwen",
        "gemma",
        "deepseek",
        "mistral",
        "mixtral",
        "kimi",
        "minimax",
        "glm",
        "gpt_oss",
        "gpt-oss",
    ),
    *("gptoss", "granite", "nemotron", "phi3", "phi4", "falcon", "cohere", "command-r", "olmo", "internlm"),
    *("baichuan", "hunyuan", "jamba", "bamba", "zamba", "lfm2", "plamo", "ernie", "dbrx", "arctic", "step3"),
    *(
        "mamba",
        "rwkv",
        "eagle",
        "medusa",
        "deltanet",
        "gated_delta",
        "lightning_attn",
        "linear_attn",
        "whisper",
    ),
)
#: Short ones that must be a word of their own, or a part of a name between underscores or capitals.
SHORT_WORDS = (
    "mla",
    "gdn",
    "kda",
    "dsa",
    "ssm",
    "mtp",
    "swa",
    "gqa",
    "mqa",
    "moe",
    "nsa",
    "yi",
    "gpt",
    "phi",
)

_LONG = re.compile("|".join(map(re.escape, WORDS)), re.IGNORECASE)
_SHORT = re.compile(rf"(?<![a-z])(?:{'|'.join(SHORT_WORDS)})(?![a-z])", re.IGNORECASE)
_CAMEL = re.compile(rf"(?:{'|'.join(word.upper() for word in SHORT_WORDS)})(?=[A-Z][a-z])")


def names_an_architecture(line: str) -> bool:
    return any(pattern.search(line) for pattern in (_LONG, _SHORT, _CAMEL))


def offending_lines() -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and path.suffix in {".py", ".pyi", ".json", ".toml"} and path.name != "_compat.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if names_an_architecture(line)
    ]


def test_number_of_lines_that_name_an_architecture_is_zero() -> None:
    assert offending_lines() == []


def test_every_module_is_searched() -> None:
    assert len(list(PACKAGE.rglob("*.py"))) > 15


def test_search_finds_what_it_is_for() -> None:
    for line in (
        "if use_mla:",
        "class MLASpec:",
        "from x import MambaSpec",
        "# for Qwen3 only",
        'if name.startswith("eagle")',
        "kv = self.gdn_state",
        "is_moe = True",
    ):
        assert names_an_architecture(line), line
    for line in ("formula = 1", "assembled", "a small window", "if yielding:", "gptx", "familiar"):
        assert not names_an_architecture(line), line


def test_compat_has_no_need_of_them_yet() -> None:
    """When this fails for a good reason, say in `_compat.py` which call of the engine demands the word."""
    text = (PACKAGE / "vllm" / "_compat.py").read_text()
    assert not [line for line in text.splitlines() if names_an_architecture(line)]
