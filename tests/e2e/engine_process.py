"""Stock vLLM in a process of its own, for tests: reads a job from standard input, writes what happened to a file.

{"model": ..., "extra": connector switches, "llm": LLM arguments, "batches": [[token ids, ...], ...],
 "max_tokens": n, "kv_transfer_params": [what each prompt of every batch says, ...], "out": path,
 "by_name": load the connector by its registered name, "pause": wait to be killed,
 "look_at": a server's HTTP address; its workers, as it knows them while the engine runs, are written too}
"""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

from demo.generate import count_scheduled


def transfer_config(job: dict[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    config: dict[str, Any] = {
        "kv_connector": "QServerConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": job["extra"],
    }
    if not job.get("by_name"):
        config["kv_connector_module_path"] = "lmcache_qclient.vllm.connector"
    if job.get("beside_another"):
        other = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": job["beside_another"]},
        }
        connectors = {"connectors": [config, other]}
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": connectors,
        }
    return config


def known_workers(http_url: str) -> Any:
    """`q_context_meta` of a server's /status."""
    with urllib.request.urlopen(f"{http_url}/status", timeout=10) as reply:
        return json.load(reply)["q_context_meta"]


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    scheduled = count_scheduled()
    from vllm import LLM, SamplingParams, TokensPrompt

    arguments = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "gpu_memory_utilization": 0.5,
        "kv_transfer_config": transfer_config(job),
        **job["llm"],
    }
    llm = LLM(model=job["model"], **arguments)
    asked = job.get("kv_transfer_params")
    requests = []
    for batch in job["batches"]:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=job["max_tokens"],
                ignore_eos=True,
                extra_args=None if one is None else {"kv_transfer_params": one},
            )
            for one in asked or [None] * len(batch)
        ]
        for output in llm.generate(prompts, params, use_tqdm=False):
            requests.append(
                {
                    "token_ids": [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids],
                    "cached_tokens": output.num_cached_tokens or 0,
                }
            )
    workers = known_workers(job["look_at"]) if "look_at" in job else {}
    happened = {"requests": requests, "computed": scheduled["tokens"], "workers": workers}
    Path(job["out"]).write_text(json.dumps(happened))
    if job.get("pause"):
        signal.pause()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
