"""Random weights that make an engine's output depend on every slot of its KV cache.

An engine's own dummy weights are so small that the logits hardly see the cache: a restore of garbage goes
unnoticed. These are scaled like a real initialisation (standard deviation 1.7/sqrt(fan in), norms around
one), so one wrong slot changes the log-probabilities. Every tensor is seeded by its own name: the same
configuration and seed give the same file everywhere, whatever the order in which a library happens to create
its parameters.

The result is an ordinary checkpoint directory, loaded by the engine's normal loader.
"""

import argparse
import hashlib
import json
import math
import shutil
from pathlib import Path

import torch


def write_model(config_path: Path, out_dir: Path, seed: int = 0) -> Path:
    """Write `config.json` and `model.safetensors` for the configuration at `config_path` into `out_dir`.

    Returns `out_dir`. Does nothing when `out_dir` already holds exactly this configuration and seed.
    """
    config_path, out_dir = Path(config_path), Path(out_dir)
    stamp = hashlib.sha256(config_path.read_bytes() + str(seed).encode()).hexdigest()
    stamp_path = out_dir / ".written"
    if stamp_path.is_file() and stamp_path.read_text() == stamp:
        return out_dir

    from transformers import AutoConfig, AutoModelForCausalLM

    out_dir.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(config_path, out_dir / "config.json")
    dtype = getattr(torch, json.loads(config_path.read_text()).get("torch_dtype", "bfloat16"))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out_dir), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter.shape, seed))
    model.save_pretrained(out_dir)
    # save_pretrained writes its own idea of the configuration: the engine shall read ours.
    shutil.copyfile(config_path, out_dir / "config.json")
    stamp_path.write_text(stamp)
    return out_dir


def _values(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise * (1.7 / math.sqrt(shape[-1]))
    return 0.1 * noise + (1.0 if "norm" in name else 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random-weight model for a config.json.")
    parser.add_argument("config", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(write_model(arguments.config, arguments.out, arguments.seed))


if __name__ == "__main__":
    main()
