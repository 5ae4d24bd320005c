"""Everything that depends on which vLLM this is. The only file that looks at its version."""

import hashlib
import os
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from adp_engines.errors import UnsupportedEngine

#: Version lines whose seams this adapter was tested on.
SUPPORTED = ("0.28", "0.29")


def engine_version() -> str:
    """vLLM's version line, as "0.28"."""
    from vllm.version import __version__

    return ".".join(__version__.split(".")[:2])


def check_version() -> None:
    """Raise UnsupportedEngine unless the adapter was tested on this vLLM."""
    version = engine_version()
    if version not in SUPPORTED:
        raise UnsupportedEngine(f"vLLM {version} is not supported; supported: {', '.join(SUPPORTED)}")


def transfer_config_in_question() -> Any | None:
    """The KVTransferConfig that vLLM is looking up a connector class for, if it is doing that right now.

    vLLM resolves the class while it builds its configuration, long before it loads a model, but calls nothing
    of it with the configuration at hand on every platform. The look-up's argument is read from its frame,
    never changed there (docs/adr/0020). None when called from anywhere else: the connector's constructor then
    checks, later.
    """
    from vllm.config.kv_transfer import KVTransferConfig

    for frame in _callers():
        candidate = frame.f_locals.get("kv_transfer_config")
        if isinstance(candidate, KVTransferConfig):
            return candidate
    return None


def stores_unwritten_tail() -> bool:
    """Whether this vLLM, asked to offload generated tokens too, stores the slot of a token it never ran."""
    return engine_version() in ("0.28", "0.29")


def make_block_hashes_stable(algorithm: str) -> None:
    """See to it that block hashes are the same in the next process.

    Must run in the scheduler's process before vLLM seeds its hashes; that happens right after it built the
    scheduler.
    """
    from vllm.v1.core import kv_cache_utils

    if hasattr(kv_cache_utils, "resolve_none_hash_seed") and "xxhash" not in algorithm:
        return
    os.environ.setdefault("PYTHONHASHSEED", "0")


def let_attention_use_tiles() -> None:
    """Ask the system for AMX tiles where the processor has them; does nothing elsewhere, or a second time.

    vLLM's CPU attention uses them with bfloat16, and leaves the asking to the first large product of another
    library. The first step of an engine whose prompt was restored has no such product, and the engine died of
    an illegal instruction (0.28.0 and 0.29.0).
    """
    import torch

    ask = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


def block_hash_seed_digest() -> str:
    """A digest of the value that all block hash chains start from. Only valid once the engine has started."""
    from vllm.v1.core import kv_cache_utils

    return hashlib.sha256(bytes(kv_cache_utils.NONE_HASH)).hexdigest()


def scheduler_in_construction() -> Any | None:
    """The vLLM Scheduler whose constructor is calling us, or None.

    0.28 and 0.29 have no request-level way for a connector to report a failed load; the scheduler's own set
    `failed_recving_kv_req_ids` does the job, and this is how a connector meets its scheduler (docs/adr/0022).
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    for frame in _callers():
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Scheduler):
            return candidate
    return None


def _callers(depth: int = 6) -> Iterator[FrameType]:
    """The frames that called our caller, nearest first."""
    frame = sys._getframe(2)
    for _ in range(depth):
        yield frame
        if frame.f_back is None:
            return
        frame = frame.f_back


def fail_restore(scheduler: Any, request_id: str) -> bool:
    """Have the engine compute a waiting request's prompt itself. False if it does not wait for a load."""
    from vllm.v1.request import RequestStatus

    request = scheduler.requests.get(request_id)
    if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
        return False
    request.num_computed_tokens = 0
    scheduler.failed_recving_kv_req_ids.add(request_id)
    return True
