"""A tiny random Idefics3 (sees pictures) with tokenizer and processor, made offline; and its queries by transformers.

A vision tower of two layers before a Llama of two layers. Not LLaVA or Qwen-VL: vLLM's need torchvision, which does not
load beside the CPU's torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

WORDS = 300
IMAGE, AROUND, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
SIZE, PATCH, SHRINK = 112, 14, 2
IMAGE_TOKENS = (SIZE // PATCH) ** 2 // SHRINK**2
PLACEHOLDERS = IMAGE_TOKENS + 3
"""Tokens that a picture takes: its own, and what stands around them."""
HEADS, HEAD_DIM = 4, 32


def word(number: int) -> str:
    """A word of the tokenizer's vocabulary; one token each."""
    return f"w{number}"


def make_model(folder: Path) -> Path:
    """Write the checkpoint."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    tokenizer = _processor(folder)
    config = Idefics3Config(
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIZE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": len(tokenizer),
            "hidden_size": HEADS * HEAD_DIM,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 512,
            "pad_token_id": tokenizer.pad_token_id,
        },
        scale_factor=SHRINK,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Idefics3ForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the usual 0.02 leaves every picture nearly the same
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return folder


def _processor(folder: Path) -> Any:
    """Write tokenizer and processor; the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    special = ["<unk>", "<s>", "</s>", "<pad>", IMAGE, AROUND, GLOBAL, "<end_of_utterance>"]
    texts = [*special, *map(word, range(WORDS))]
    plain = Tokenizer(
        models.WordLevel({text: place for place, text in enumerate(texts)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[4:],
    )
    edge = {"longest_edge": SIZE}
    pictures = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = Idefics3Processor(pictures, tokenizer, image_seq_len=IMAGE_TOKENS)
    processor.save_pretrained(folder)
    return tokenizer


def make_picture(path: Path, seed: int) -> Path:
    """A random picture."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (SIZE, SIZE, 3), generator=generator, dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).save(path)
    return path


@torch.inference_mode()
def reference_queries(
    folder: Path, token_ids: Sequence[int], pictures: Sequence[Path]
) -> torch.Tensor:
    """Queries by transformers, fp32: `[layers, tokens, heads, head_dim]`."""
    from PIL import Image
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model: Any = Idefics3ForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
    if pictures:
        processor = AutoProcessor.from_pretrained(folder)
        opened = [[Image.open(path) for path in pictures]]
        seen = processor.image_processor(opened, return_tensors="pt")
        inputs["pixel_values"] = seen["pixel_values"]
        inputs["pixel_attention_mask"] = seen["pixel_attention_mask"]
    text = model.model.text_model
    projected: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(
            lambda module, given, output: projected.append(output[0])
        )
        for layer in text.layers
    ]
    model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    shape = (len(projected), len(token_ids), HEADS, HEAD_DIM)
    q = torch.stack(projected).view(shape).transpose(1, 2)
    cos, sin = text.rotary_emb(q, torch.arange(len(token_ids)).unsqueeze(0))
    turned: torch.Tensor = apply_rotary_pos_emb(q, q[:, :1], cos, sin)[0]
    return turned.transpose(1, 2).contiguous()
