"""vLLM's configuration objects for a scenario: real ones, of a model of which only the configuration exists."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from tests.scheduler.model import LAYERS
from tests.scheduler.scenario import Scenario
from tests.worker_client.capture.fake_vllm import layer_names

SPEC = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


@functools.cache
def _model_config() -> Any:
    """A model of which only the configuration exists."""
    init_none_hash(sha256)
    folder = Path(tempfile.mkdtemp(prefix="lmcache-q-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": LAYERS,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        seed=0,
        enforce_eager=True,
        generation_config="vllm",
    )


def vllm_config(scenario: Scenario) -> Any:
    """A whole `VllmConfig`, with our connector in it."""
    model = copy.copy(_model_config())
    model.max_model_len = scenario.max_length
    speculative = None
    if scenario.drafts:
        speculative = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=scenario.drafts,
            prompt_lookup_max=3,
            prompt_lookup_min=1,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=scenario.block_size, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=scenario.max_running,
            max_num_batched_tokens=scenario.budget,
            max_model_len=scenario.max_length,
            is_encoder_decoder=False,
            long_prefill_token_threshold=scenario.long_prefill,
            policy="priority" if scenario.priority else "fcfs",
            scheduler_reserve_full_isl=scenario.reserve,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="QServerConnector",
            kv_connector_module_path="lmcache_qclient.vllm.connector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "lmcache.mp.transfer_intermediate_tensors": True,
                "lmcache.q.tokens": scenario.tokens,
                "lmcache.q.sample": scenario.sample,
            },
        ),
        speculative_config=speculative,
    )
    # What the CPU platform switches off, and a single process can't have.
    config.scheduler_config.async_scheduling = scenario.family.asynchronous
    config.parallel_config.pipeline_parallel_size = scenario.family.stages
    config.cache_config.num_gpu_blocks = scenario.num_blocks
    return config


def cache_groups(scenario: Scenario) -> Any:
    """`KVCacheConfig`."""
    full = FullAttentionSpec(block_size=scenario.block_size, **SPEC)
    window = SlidingWindowSpec(block_size=scenario.block_size, sliding_window=24, **SPEC)
    names = layer_names(LAYERS)
    groups = {
        "full": [KVCacheGroupSpec(names, full)],
        "window": [KVCacheGroupSpec(names, window)],
        "window+full": [
            KVCacheGroupSpec(names[:1], window),
            KVCacheGroupSpec(names[1:], full),
        ],
    }[scenario.groups]
    return KVCacheConfig(
        num_blocks=scenario.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups
    )
