"""The reference against a third way: the formulas of RMSNorm, projection and rotation, written out from the weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from demo.attention import compare_attention
from demo.reference import Reference, max_relative_row_error, reference_queries

pytestmark = pytest.mark.vllm

TEXT = "The gate of the inner basin opens ninety minutes before high water."


def weights(model_dir: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(str(model_dir / "model.safetensors"))
    return tensors


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


def roped(query: torch.Tensor, theta: float) -> torch.Tensor:
    """Half-split rotary embedding of [tokens, heads, d] at positions 0, 1, ..., in float64.

    Pair i is (x[i], x[i + d/2]), turned by the angle position * theta ** (-2 i / d).
    """
    tokens, _, d = query.shape
    turned = torch.empty_like(query)
    for i in range(d // 2):
        angle = torch.arange(tokens, dtype=torch.float64) * theta ** (-2 * i / d)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        low, high = query[..., i], query[..., i + d // 2]
        turned[..., i] = low * cos - high * sin
        turned[..., i + d // 2] = high * cos + low * sin
    return turned


def of_layer(kind: str, hidden: torch.Tensor, layer: int, model_dir: Path) -> torch.Tensor:
    """Query (`q`) or key (`k`) [tokens, heads, 64] of `layer` from the hidden states [tokens, 576], in float64."""
    w = weights(model_dir)
    x = hidden.double()
    norm = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-5)
    norm = norm * w[f"model.layers.{layer}.input_layernorm.weight"].double()
    projected = norm @ w[f"model.layers.{layer}.self_attn.{kind}_proj.weight"].double().T
    return roped(projected.view(len(x), -1, 64), theta=100_000.0)


def test_first_layer_is_what_the_formulas_say(
    reference: Reference, model_dir: Path, tokenizer: Any
) -> None:
    token_ids = tokenizer.encode(TEXT)
    one_pass = reference.run(token_ids)
    queries, keys = one_pass.queries, one_pass.keys
    assert (queries.shape, queries.dtype) == ((30, len(token_ids), 9, 64), torch.float32)
    assert (keys.shape, keys.dtype) == ((30, len(token_ids), 3, 64), torch.float32)
    assert one_pass.attention == ()
    embedded = weights(model_dir)["model.embed_tokens.weight"][token_ids]
    for kind, tensor in (("q", queries), ("k", keys)):
        expected = of_layer(kind, embedded, 0, model_dir)
        assert max_relative_row_error(tensor[:1], expected[None]) < 1e-5


def test_later_layer_is_what_the_formulas_say(
    reference: Reference, model_dir: Path, tokenizer: Any
) -> None:
    token_ids = tokenizer.encode(TEXT)
    with torch.inference_mode():
        hidden = reference.model.model(
            torch.tensor([token_ids]), output_hidden_states=True
        ).hidden_states
    one_pass = reference.run(token_ids)
    for kind, tensor in (("q", one_pass.queries), ("k", one_pass.keys)):
        expected = of_layer(kind, hidden[17][0], 17, model_dir)
        assert max_relative_row_error(tensor[17:18], expected[None]) < 1e-5


def test_rotation_by_hand_would_notice_interleaved_pairs(
    reference: Reference, model_dir: Path, tokenizer: Any
) -> None:
    """The other common layout, pairs (x[2i], x[2i+1]), is far off: the comparison above can fail."""
    token_ids = tokenizer.encode(TEXT)
    w = weights(model_dir)
    interleave = torch.arange(64).view(2, 32).T.flatten()
    expected = of_layer("q", w["model.embed_tokens.weight"][token_ids], 0, model_dir)[
        ..., interleave
    ]
    assert max_relative_row_error(reference.queries(token_ids)[:1], expected[None]) > 0.1


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 5e-6), (torch.float64, 1e-6)])
def test_attention_is_what_queries_and_keys_make_of_it(
    model_dir: Path, tokenizer: Any, dtype: torch.dtype, rounding: float
) -> None:
    token_ids = tokenizer.encode(TEXT)
    one_pass = Reference(model_dir, dtype).run(token_ids, attention=True)
    assert [one.shape for one in one_pass.attention] == [(9, len(token_ids), len(token_ids))] * 30
    assert one_pass.queries.dtype == one_pass.attention[0].dtype == dtype
    found = compare_attention(one_pass.queries, one_pass.keys, one_pass.attention)
    assert found.weight_error < rounding
    swapped = one_pass.keys.roll(1, 0)
    assert compare_attention(one_pass.queries, swapped, one_pass.attention).weight_error > 0.1


def test_queries_depend_only_on_what_came_before(reference: Reference, tokenizer: Any) -> None:
    token_ids = tokenizer.encode(TEXT)
    part = reference.queries(token_ids[:7])
    assert max_relative_row_error(part, reference.queries(token_ids)[:, :7]) < 1e-4


def test_hooks_are_gone_afterwards_and_the_model_stays_loaded(
    reference: Reference, model_dir: Path, tokenizer: Any
) -> None:
    token_ids = tokenizer.encode(TEXT)
    first = reference.queries(token_ids)
    assert all(not layer.self_attn.q_proj._forward_hooks for layer in reference.model.model.layers)
    assert torch.equal(reference.queries(token_ids), first)
    assert torch.equal(reference_queries(model_dir, token_ids), first)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    Qwen3ForCausalLM(tiny).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="qwen3"):
        Reference(tmp_path)
