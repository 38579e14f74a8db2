"""Tiny random models of many architectures on disk, and their queries by transformers.

Two to four layers and a few dozen elements a head: an engine is up in seconds. What is tiny here is only the size; each
has what makes its architecture's queries special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDE: dict[str, Any] = {**COMMON, "hidden_size": 128}
"""Heads of 32 for architectures that say no `head_dim`: vLLM's CPU attention takes no heads of 16."""


def llama() -> Any:
    """Grouped queries."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **COMMON, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )


def qwen3() -> Any:
    """Query norm; heads of 32 where hidden size / heads is 16."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **COMMON, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32
    )


def gemma3() -> Any:
    """One KV head; every second layer sees a sliding window, with a RoPE of its own."""
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def gemma3n() -> Any:
    """The last two layers compute no keys and values: they use those of the layers before."""
    from transformers import Gemma3nTextConfig

    return Gemma3nTextConfig(
        **COMMON,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        altup_num_inputs=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    )


def gemma4() -> Any:
    """Heads of 32 in sliding layers, of 64 in full ones; the last two use the KV of the layers before."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        **COMMON,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=64,
        sliding_window=48,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
    )


def deepseek() -> Any:
    """MLA with yarn: query heads of 64 + 64. Two layers: the CPU's kernels are for bfloat16, whose rounding adds up."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **COMMON,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        q_lora_rank=48,
        kv_lora_rank=512,  # with the 64 of RoPE, the only size that vLLM's CPU kernels have
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        num_mtp_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )


def granite() -> Any:
    """Every second layer is Mamba 2."""
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        **WIDE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["mamba", "attention"] * 2,
        num_local_experts=0,
        shared_intermediate_size=96,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        position_embedding_type="rope",
    )


def qwen3_next() -> Any:
    """A gated delta net, then attention whose queries are normed and come with a gate. Two layers: see `deepseek`."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,  # what vLLM's CPU kernels take
        linear_value_head_dim=128,
        num_experts=2,
        num_experts_per_tok=2,  # all: else rounding decides which expert a token gets
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def lfm2() -> Any:
    """Every second layer is a short convolution."""
    from transformers import Lfm2Config

    # vLLM reads the names of the published checkpoints, of which transformers knows not all.
    published: dict[str, Any] = {"conv_dim": 128, "block_dim": 128, "block_ff_dim": 96}
    return Lfm2Config(
        **WIDE,
        **published,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    )


def make_model(config: Any, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # The usual 0.02 leaves the tokens' rows too much alike for a mix-up to show.
            if parameter.dim() > 1 and not name.endswith(("conv.weight", "conv1d.weight")):
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


@torch.inference_mode()
def reference_queries(
    folder: Path,
    token_ids: Sequence[int],
    rearrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> dict[int, torch.Tensor]:
    """Queries by transformers, fp32: layer -> `[tokens, heads, head_dim]`, as its attention gets them.

    Args:
        rearrange: brings the elements of a head into the engine's order.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    seen: dict[int, torch.Tensor] = {}

    def watched(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen[module.layer_idx] = query[0].transpose(0, 1).float().contiguous()
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("watched", watched)
    AttentionMaskInterface.register("watched", sdpa_mask)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="watched"
    ).eval()
    model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return {layer: rearrange(q) if rearrange else q for layer, q in sorted(seen.items())}
