"""The reader's part of the demo, a process of its own: ask for every prompt's queries by token ids, check every row.

What is checked against: transformers (demo/reference.py), and a count of tokens by the prompts' lengths alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from demo.figure import draw_query_norms
from demo.reference import max_relative_row_error, reference_queries
from lmcache_qclient.qcache import connect


def expected_capture(request: dict[str, Any]) -> int:
    """Tokens of a request that get a row: [cached, length - 1).

    What the prefix cache had is not computed, and the last sampled token never is.
    """
    computed: int = len(request["token_ids"]) - 1 - request["cached_tokens"]
    return max(0, computed)


def expected_retrieval(tokens: list[int], requests: list[dict[str, Any]]) -> int:
    """Tokens of the longest prefix of which every token's row has been computed by some request that begins alike."""
    spans = []
    for request in requests:
        theirs = request["token_ids"][:-1]
        alike = 0
        while alike < min(len(tokens), len(theirs)) and tokens[alike] == theirs[alike]:
            alike += 1
        spans.append((request["cached_tokens"], alike))
    end = 0
    for first, alike in sorted(spans):
        if first <= end:
            end = max(end, alike)
    return end


def main() -> None:
    """Retrieve, compare, draw, and write what came out to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--http-url", required=True)
    parser.add_argument("--engine-report", type=Path, required=True)
    parser.add_argument("--picture", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    engine = json.loads(options.engine_report.read_text())

    rows: list[dict[str, Any]] = []
    kept: list[tuple[dict[str, Any], torch.Tensor]] = []
    retrieved_bytes, retrieve_seconds = 0, 0.0
    with connect(options.server_url, options.http_url, options.model) as cache:
        for request in engine["requests"]:
            began = time.perf_counter()
            result = cache.retrieve(request["token_ids"])
            retrieve_seconds += time.perf_counter() - began
            retrieved_bytes += result.tensor.nbytes
            kept.append((request, result.tensor))
            print(f"  {request['name']}: {result.num_tokens} tokens retrieved", flush=True)
    for request, tensor in kept:
        reference = reference_queries(Path(options.model), request["token_ids"])
        error = max_relative_row_error(tensor, reference[:, : tensor.shape[1]])
        rows.append(
            {
                "prompt": request["name"],
                "tokens": len(request["token_ids"]),
                "cached": request["cached_tokens"],
                "retrieved": tensor.shape[1],
                "expected": expected_retrieval(request["token_ids"], engine["requests"]),
                "max rel. row error": error,
            }
        )
        print(
            f"  {request['name']}: every row of {tensor.shape[0]} layers compared, max error {error:.1e}",
            flush=True,
        )
    longest, tensor = max(kept, key=lambda item: item[1].shape[1])
    draw_query_norms(
        tensor, options.picture, f"SmolLM2-135M: queries of the prompt “{longest['name']}”"
    )
    options.out.write_text(
        json.dumps(
            {
                "rows": rows,
                "max_rel_row_error": max(row["max rel. row error"] for row in rows),
                "tokens_expected": sum(expected_capture(request) for request in engine["requests"]),
                "retrieve_gb_s": retrieved_bytes / retrieve_seconds / 1e9,
                "retrieved_bytes": retrieved_bytes,
            }
        )
    )


if __name__ == "__main__":
    main()
