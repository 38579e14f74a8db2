"""One vLLM engine in a process of its own, driven line by line: `python -m benchmarks.engine MODEL [SERVER_URL]`.

Each line on standard input is the number of a batch; the answer on standard output is one JSON line with its seconds.
With a server's address, capture is on. One thread computes, in bf16 where the processor has instructions for it, else
in fp32: emulated bf16 is so slow that no overhead would show.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

PROMPTS = 2
PROMPT_TOKENS = 512
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


def fast_dtype() -> str:
    """The dtype that this processor is fastest in."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if flags & BF16_FLAGS else "float32"


def main() -> None:
    """Serve batches until standard input closes."""
    model, *server = sys.argv[1:]
    # vLLM prints to standard output; the answers go to a copy of it, the rest to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt

    transfer = {
        "kv_connector": "QServerConnector",
        "kv_connector_module_path": "lmcache_qclient.vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "lmcache.mp.transfer_intermediate_tensors": True,
            "lmcache.q.server_url": server[0] if server else "",
        },
    }
    llm = LLM(
        model=model,
        dtype=fast_dtype(),
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,  # of host memory, on a CPU; two engines run side by side
        kv_transfer_config=transfer if server else None,
    )
    params = SamplingParams(temperature=0, max_tokens=1)
    for line in sys.stdin:
        chance = random.Random(int(line))
        prompts = [
            TokensPrompt(
                prompt_token_ids=[chance.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
            )
            for _ in range(PROMPTS)
        ]
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - began}), file=answers)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
