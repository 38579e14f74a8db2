"""One vLLM engine in a process of its own, driven line by line: `python -m benchmarks.engine --model PATH ...`.

Each line on standard input is a batch (`Load.message`); the answer on standard output is one JSON line: its wall and
CPU seconds, the tokens that vLLM's scheduler has scheduled for it, the worker's account so far, and with `--profile`
what our hooks took. With `--server-url` capture is on, but for batches that say `stock`. One thread computes, on one
core.

Garbage is collected before each batch, outside its time, so that a collection that one engine owes does not fall
upon the other's pair; what capture itself makes of garbage is collected inside, as it is in life.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.load import Load
from demo.generate import count_scheduled
from lmcache_qclient.capture.account import Account

BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
MAX_MODEL_LEN = 1024
BATCHED_TOKENS = 1024
SEQUENCES = 8


def fast_dtype() -> str:
    """bfloat16 where the processor has instructions for it, else float32.

    Emulated bf16 is some 16 times slower than float32, and no overhead would show in it.
    """
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return "bfloat16" if flags & BF16_FLAGS else "float32"


def transfer_config(options: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's `kv_transfer_config`; None without a server."""
    if not options.server_url:
        return None
    extra = {
        "lmcache.mp.transfer_intermediate_tensors": True,
        "lmcache.q.server_url": options.server_url,
    }
    if options.heartbeat_s:
        extra["lmcache.q.heartbeat_s"] = options.heartbeat_s
    return {
        "kv_connector": "QServerConnector",
        "kv_connector_module_path": "lmcache_qclient.vllm.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }


def note_accounts() -> list[Account]:
    """The workers' accounts that will be made in this process; call before the engine is built."""
    made: list[Account] = []
    build = Account.__init__

    def noting(account: Account) -> None:
        build(account)
        made.append(account)

    setattr(Account, "__init__", noting)  # noqa: B010 - mypy lets nobody assign to it
    return made


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-url", default="")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument("--core", type=int, default=None)
    parser.add_argument("--heartbeat-s", type=float, default=0.0, help="0: the default")
    parser.add_argument("--profile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Serve batches until standard input closes."""
    options = parse()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    # vLLM prints to standard output; the answers go to a copy of it, the rest to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    scheduled, accounts = count_scheduled(), note_accounts()
    hooks: dict[str, list[float]] = {}
    if options.profile:
        from benchmarks.hook_times import time_hooks

        hooks = time_hooks()
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.4,  # of host memory, on a CPU
        kv_transfer_config=transfer_config(options),
    )
    capture = _capture(llm) if options.server_url else None
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        seed, stock, load = _parse_batch(line)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in load.token_ids(seed)]
        params = SamplingParams(temperature=0, max_tokens=load.new_tokens, ignore_eos=True)
        hooks.clear()
        before = dict(scheduled)
        gc.collect()
        with contextlib.ExitStack() as stack:
            if stock and capture is not None:
                stack.enter_context(capture.stock())
            began, cpu_began = time.perf_counter(), time.process_time()
            llm.generate(prompts, params, use_tqdm=False)
            if not stock and capture is not None:
                capture.end_batch()
            seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        answer = {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "computed": scheduled["tokens"] - before["tokens"],
            "steps": scheduled["steps"] - before["steps"],
            "account": msgspec.to_builtins(accounts[0].report()) if accounts else {},
            "hooks": hooks,
        }
        print(json.dumps(answer), file=answers)
    llm.llm_engine.engine_core.shutdown()


def _capture(llm: Any) -> Any:
    # Here, because it imports vLLM, which takes its settings from the environment when it is imported.
    from benchmarks.stock import Capture

    return Capture(llm)


def _parse_batch(line: str) -> tuple[int, bool, Load]:
    message = json.loads(line)
    return message.pop("seed"), message.pop("stock"), Load(**message)


if __name__ == "__main__":
    main()
