"""Stock vLLM in a process of its own, for requests that are more than token ids. Reads a job from standard input.

{"model": ..., "extra": connector switches, "llm": LLM arguments, "max_tokens": n, "out": path,
 "batches": [[{"token_ids": [...], "salt": str, "lora": [name, id, path], "embeds": path of a .pt file,
               "is_token": [bool, ...], "image": path of a .npy file, "text": str}, ...], ...]}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from demo.generate import count_scheduled
from tests.e2e.engine_process import transfer_config


def prompt_of(request: dict[str, Any]) -> dict[str, Any]:
    """vLLM's prompt."""
    prompt: dict[str, Any] = {}
    if "text" in request:
        prompt["prompt"] = request["text"]
    if "token_ids" in request:
        prompt["prompt_token_ids"] = request["token_ids"]
    if "embeds" in request:
        import torch

        prompt["prompt_embeds"] = torch.load(request["embeds"])
    if "is_token" in request:
        prompt["prompt_is_token_ids"] = request["is_token"]
    if "images" in request:
        from PIL import Image

        pictures = [Image.open(path) for path in request["images"]]
        prompt["multi_modal_data"] = {"image": pictures}
    if "salt" in request:
        prompt["cache_salt"] = request["salt"]
    return prompt


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    scheduled = count_scheduled()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.4,
        "kv_transfer_config": transfer_config(job),
        **job["llm"],
    }
    llm = LLM(model=job["model"], **arguments)
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)
    requests = []
    for batch in job["batches"]:
        loras = [LoRARequest(*one["lora"]) if "lora" in one else None for one in batch]
        outputs = llm.generate(
            [prompt_of(one) for one in batch], params, use_tqdm=False, lora_request=loras
        )
        for output in outputs:
            requests.append(
                {
                    "prompt": list(output.prompt_token_ids or ()),
                    "output": list(output.outputs[0].token_ids),
                    "cached_tokens": output.num_cached_tokens or 0,
                }
            )
    Path(job["out"]).write_text(json.dumps({"requests": requests, "computed": scheduled["tokens"]}))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
