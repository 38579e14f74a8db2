"""Engine configurations whose queries can't be captured rightly: refused at start, with what to change."""

from __future__ import annotations

from typing import Any


def refuse_unsupported(vllm_config: Any) -> None:
    """Check vLLM's configuration.

    Raises:
        ValueError: context parallelism, microbatches, KV-sharing fast prefill, exchange of weights, or async
            scheduling of drafts.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if int(getattr(parallel, name, 1) or 1) > 1:
            raise ValueError(
                f"query capture does not work with {name} > 1: a rank sees only part of each token's slots"
            )
    if getattr(parallel, "enable_dbo", False) or int(getattr(parallel, "ubatch_size", 0) or 0) > 1:
        raise ValueError(
            "query capture does not work with enable_dbo or ubatch_size: a step's rows come in several parts then"
        )
    if getattr(cache, "kv_sharing_fast_prefill", False):
        raise ValueError(
            "query capture does not work with kv_sharing_fast_prefill: shared layers skip prompt rows"
        )
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError(
            "query capture does not work with weight_transfer_config: no key tells the queries of one set of weights "
            "from those of the next"
        )
    scheduler = getattr(vllm_config, "scheduler_config", None)
    drafts = getattr(vllm_config, "speculative_config", None) is not None
    if drafts and getattr(scheduler, "async_scheduling", False):
        raise ValueError(
            "query capture does not work with async scheduling and speculative decoding together: steps are scheduled "
            "before it is known which drafts were accepted, so positions are guesses. Pass --no-async-scheduling, or "
            "drop --speculative-config"
        )
