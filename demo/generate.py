"""The engine's part of the demo, a process of its own: stock vLLM on the demo's prompts, with capture on.

Writes what an auditor needs to `--out`: token ids, how many tokens the scheduler said it would compute (counted here,
outside of our ledger), and how many of each prompt came out of the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from demo.audit import FEATURES
from demo.prompts import PROMPTS, tokenize

MAX_TOKENS = 8
BATCHED_TOKENS = 320
"""Below every long prompt, and no divisor of anything: chunks are filled over several steps."""


def count_scheduled() -> dict[str, int]:
    """Count the tokens of every step where vLLM decides them."""
    from vllm.v1.core.sched.scheduler import Scheduler

    count = {"tokens": 0, "steps": 0}
    schedule = Scheduler.schedule

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        count["tokens"] += sum(output.num_scheduled_tokens.values())
        count["steps"] += bool(output.num_scheduled_tokens)
        return output

    Scheduler.schedule = counting
    return count


def main() -> None:
    """Run the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    scheduled = count_scheduled()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=options.model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=4,
        gpu_memory_utilization=0.5,  # of host memory, on a CPU
        kv_transfer_config={
            "kv_connector": "QServerConnector",
            "kv_connector_module_path": "lmcache_qclient.vllm.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "lmcache.mp.transfer_intermediate_tensors": list(FEATURES),
                "lmcache.q.server_url": options.server_url,
            },
        },
    )
    token_ids = tokenize(llm.get_tokenizer())
    began = time.monotonic()
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in token_ids.values()],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True),
        use_tqdm=True,
    )
    seconds = time.monotonic() - began
    requests = [
        {
            "name": prompt.name,
            "token_ids": list(output.prompt_token_ids or ()) + list(output.outputs[0].token_ids),
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "cached_tokens": output.num_cached_tokens or 0,
            "text": output.outputs[0].text,
        }
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    report = {
        "requests": requests,
        "tokens_computed": scheduled["tokens"],
        "steps": scheduled["steps"],
        "generate_seconds": seconds,
    }
    options.out.write_text(json.dumps(report))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
