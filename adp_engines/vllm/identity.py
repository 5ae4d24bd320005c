"""What vLLM knows about itself that a namespace must contain.

Fields are taken by property, never by the name of a model: whatever setting of the cache speaks of a dtype, a
mode or a scale counts, and so does every field of the engine's own description of a group's pages.
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from adp_engines.errors import StartupRefused
from adp_engines.namespace import JSON, Identity, weights_identity

from . import _compat

#: Settings of the model's configuration that name where it came from rather than what it is.
_NOT_IDENTITY = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
_CACHE_WORDS = ("dtype", "cache_mode", "scale", "quant", "layout", "block_size")


def describe(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    blocks_per_chunk: int,
    tokens_per_hash: int,
    model_id: str | None,
) -> Identity:
    """Everything but the workers' layouts and the hash seed; they are known later (`attrs.evolve` adds them).

    Raises StartupRefused if the model's weights cannot be identified and the user did not name them.
    """
    model_config = vllm_config.model_config
    cache_config = vllm_config.cache_config
    parallel_config = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return Identity(
        model=model_id if model_id is not None else _weights(model_config, vllm_config.load_config),
        computation={
            "config": _plain(_without(model_config.hf_config.to_dict(), _NOT_IDENTITY)),
            "dtype": str(model_config.dtype),
            "quantization": model_config.quantization,
            # Position scaling may look at the length the engine was started for.
            "max_model_len": model_config.max_model_len
            if _scales_positions(model_config.hf_config)
            else None,
            "draft": None
            if speculative is None
            else [str(speculative.method), _weights(speculative.draft_model_config, vllm_config.load_config)]
            if getattr(speculative, "draft_model_config", None) is not None and model_id is None
            else str(speculative.method),
        },
        cache={
            name: _plain(value)
            for name, value in sorted(vars(cache_config).items())
            if not name.startswith("_") and any(word in name for word in _CACHE_WORDS)
        },
        blocks={
            "tokens_per_hash": tokens_per_hash,
            "blocks_per_chunk": blocks_per_chunk,
            "groups": [
                [type(group.kv_cache_spec).__name__, _plain(group.kv_cache_spec)]
                for group in kv_cache_config.kv_cache_groups
            ],
        },
        parallel={
            name: getattr(parallel_config, name)
            for name in (
                "world_size",
                "tensor_parallel_size",
                "pipeline_parallel_size",
                "prefill_context_parallel_size",
                "decode_context_parallel_size",
            )
        }
        | {"expert_parallel": bool(parallel_config.enable_expert_parallel)},
        layouts=(),
        hashing={"algorithm": cache_config.prefix_caching_hash_algo},
        engine={"name": "vllm", "version": _compat.engine_version()},
    )


def _weights(model_config: Any, load_config: Any) -> JSON:
    if str(load_config.load_format) == "dummy":
        return {
            "dummy": model_config.seed,
            "of": _plain(_without(model_config.hf_config.to_dict(), _NOT_IDENTITY)),
        }
    model = Path(model_config.model_weights or model_config.model)
    try:
        if model.is_dir():
            return weights_identity(model)
        if model.is_file():
            return weights_identity(model.parent)
        snapshot = _snapshot(str(model_config.model), model_config.revision)
        if snapshot is not None:
            return {"repository": str(model_config.model), "commit": snapshot}
    except OSError as error:
        raise StartupRefused(
            f"cannot identify the model's weights: {error}; or name them @ $.adp.model_id"
        ) from error
    raise StartupRefused(
        f"cannot identify the weights of {model_config.model!r}: neither a directory nor a cached snapshot;"
        " name them @ $.adp.model_id"
    )


def _snapshot(repository: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(path).parent.name if isinstance(path, str) else None


def _scales_positions(hf_config: Any) -> bool:
    text = getattr(hf_config, "text_config", hf_config)
    scaling = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None)
    if not isinstance(scaling, Mapping):
        return scaling is not None
    kinds = {str(v) for k, v in scaling.items() if k in ("rope_type", "type")}
    kinds |= {str(v.get("rope_type")) for v in scaling.values() if isinstance(v, Mapping)}
    return not kinds <= {"default", "None"}


def _without(mapping: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {
        key: _without(value, names) if isinstance(value, Mapping) else value
        for key, value in mapping.items()
        if key not in names
    }


def _plain(value: Any) -> JSON:
    """`value` as JSON whose text is the same in every process: no addresses, no set order."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    text = str(value)
    if " at 0x" in text:
        raise StartupRefused(f"cannot describe a {type(value).__name__} for the namespace")
    return text


def describe_without_engine(config: Any) -> Identity:
    """The same from a spec's configuration alone; the user's `model_id` stands for what it does not tell."""
    return Identity(
        model=str(config.extra_config["adp"]["model_id"]),
        computation={},
        cache={"dtype": config.model.dtype, "layout": getattr(config, "kv_cache_layout", None)},
        blocks={
            "tokens_per_hash": config.cache.tokens_per_hash,
            "blocks_per_chunk": config.cache.blocks_per_chunk,
            "groups": [[group.tokens_per_block, len(group.layer_names)] for group in config.groups],
            "worker_bytes": config.worker_kv_bytes_per_block,
        },
        parallel={
            name: getattr(config.parallel, name)
            for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        },
        layouts=(),
        hashing={},
        engine={"name": "vllm", "version": _compat.engine_version()},
    )
