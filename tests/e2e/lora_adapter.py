"""Small random LoRA adapters for a Llama checkpoint, and the reference that has them merged into its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo.reference import Reference

RANK, ALPHA = 8, 16
MODULES = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj")


def make_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write an adapter that vLLM loads: rank 8 on four modules of every layer, large enough to change every row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        name.removesuffix(".weight"): tensor.shape
        for name, tensor in load_file(model / "model.safetensors").items()
        if name.removesuffix(".weight").endswith(MODULES)
    }
    tensors = {}
    for name, (rows, columns) in shapes.items():
        a = torch.randn(RANK, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, RANK, generator=generator) * 0.05
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.split(".")[1] for module in MODULES],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


class MergedReference(Reference):
    """The reference model with an adapter's delta in its weights: W + alpha / rank * B A, in fp32."""

    def __init__(self, model: Path, adapter: Path) -> None:
        super().__init__(model)
        tensors = load_file(adapter / "adapter_model.safetensors")
        weights = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, a in tensors.items():
                if name.endswith(".lora_A.weight"):
                    b = tensors[name.replace(".lora_A.", ".lora_B.")]
                    module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                    weights[f"{module}.weight"] += ALPHA / RANK * (b @ a)
