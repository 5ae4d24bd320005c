"""Where vLLM's factories find our classes by name, and the first place that sees a user's configuration.

vLLM asks for the connector's class while it builds its configuration. Module attributes are resolved on every
such request (PEP 562), so this is where a mistake stops start-up: before any model loads, with one line.
"""

import sys
from typing import Any

from adp_client.protocol.errors import ConfigError
from adp_engines.config import OffloadingConfig, structure_offloading
from adp_engines.errors import StartupRefused
from adp_engines.vllm import _compat
from adp_engines.vllm.plugin import CONNECTOR_NAME, SPEC_NAME

#: The keys of `kv_connector_extra_config` that vLLM's offloading framework reads itself, with their types.
_FRAMEWORK_KEYS: dict[str, type] = {
    "spec_name": str,
    "block_size": int,
    "blocks_per_chunk": int,
    "canonical_layout": bool,
    "offload_prompt_only": bool,
    "self_describing_kv_events": bool,
    "enable_cross_layers_blocks": bool,
}


def __getattr__(name: str) -> Any:
    if name == CONNECTOR_NAME:
        try:
            _compat.check_version()
            transfer_config = _compat.transfer_config_in_question()
            if transfer_config is not None and transfer_config.kv_connector == CONNECTOR_NAME:
                prepare(transfer_config)
        except StartupRefused as refusal:
            tell(refusal)
            raise
        from .connector import ADPOffloadingConnector

        return ADPOffloadingConnector
    if name == SPEC_NAME:
        from .spec import ADPOffloadingSpec

        return ADPOffloadingSpec
    raise AttributeError(name)


def prepare(transfer_config: Any) -> OffloadingConfig:
    """Check what the user wrote and settle what follows from it. Idempotent.

    Returns the adapter's settings. Raises StartupRefused with every problem in its one line.
    """
    extra = transfer_config.kv_connector_extra_config
    try:
        config = settings(extra)
    except ConfigError as error:
        raise StartupRefused("; ".join(error.problems)) from error
    if transfer_config.kv_role != "kv_both":
        raise StartupRefused(f'expected kv_role "kv_both", not "{transfer_config.kv_role}"')
    extra["spec_name"] = SPEC_NAME
    # A load that fails after all is computed again; vLLM's own default would fail the user's request.
    transfer_config.kv_load_failure_policy = "recompute"
    return config


def settings(extra: dict[str, Any]) -> OffloadingConfig:
    """The settings in `kv_connector_extra_config`. Raises ConfigError naming every problem."""
    problems: list[str] = []
    for key, value in extra.items():
        if key == "adp":
            continue
        kind = _FRAMEWORK_KEYS.get(key)
        if kind is None:
            problems.append(f"unknown key (allowed: adp, {', '.join(sorted(_FRAMEWORK_KEYS))}) @ $.{key}")
        elif type(value) is not kind:
            problems.append(f"expected {kind.__name__}, not {type(value).__name__} @ $.{key}")
        elif isinstance(value, int) and value < 1 and kind is int:
            problems.append(f"must be at least 1: {value} @ $.{key}")
    if extra.get("spec_name", SPEC_NAME) != SPEC_NAME:
        problems.append(f'expected "{SPEC_NAME}", not "{extra["spec_name"]}" @ $.spec_name')
    if extra.get("offload_prompt_only") is False and _compat.stores_unwritten_tail():
        problems.append(
            "false is unsafe on this vLLM: it stores a token that was never run @ $.offload_prompt_only"
        )
    try:
        config = structure_offloading(extra.get("adp", {}))
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from None
    if problems:
        raise ConfigError(tuple(problems))
    return config


def tell(refusal: StartupRefused) -> None:
    """Print the one line. A SystemExit with a status prints nothing by itself."""
    print(refusal, file=sys.stderr, flush=True)
