"""The reader's part of the demo, a process of its own: ask for queries and keys by token ids, check every row, and
compute attention from them.

What is checked against: transformers (demo/reference.py), and a count of tokens by the prompts' lengths alone.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.attention import (
    Comparison,
    attention_weights,
    compare_attention,
    largest_difference,
    median_head,
)
from demo.attention_figure import draw_causal_map, draw_sink_mass
from demo.figure import draw_query_norms
from demo.reference import Reference, max_relative_row_error
from lmcache_qclient.qcache import QCacheContext, connect


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


@dataclass(frozen=True)
class Stored:
    """What the store gave back for one request: [layers, tokens, heads, head_dim] each, tokens that both have."""

    name: str
    token_ids: list[int]
    queries: torch.Tensor
    keys: torch.Tensor


def retrieve_all(
    cache: QCacheContext, requests: list[dict[str, Any]]
) -> tuple[list[Stored], float]:
    """Queries and keys of every request, and how fast they came in GB/s."""
    stored, num_bytes, seconds = [], 0, 0.0
    for request in requests:
        began = time.perf_counter()
        queries, keys = (
            cache.retrieve(request["token_ids"], feature=feature).tensor
            for feature in ("query", "key")
        )
        seconds += time.perf_counter() - began
        num_bytes += queries.nbytes + keys.nbytes
        both = min(queries.shape[1], keys.shape[1])
        stored.append(
            Stored(request["name"], request["token_ids"], queries[:, :both], keys[:, :both])
        )
        print(f"  {request['name']}: {both} tokens retrieved", flush=True)
    return stored, num_bytes / seconds / 1e9


def check(
    stored: Stored, reference: Reference, exact: Reference | None
) -> tuple[dict[str, Any], Comparison]:
    """Every row and every attention weight of one prompt, against transformers.

    With `exact`, a reference in float64, also how far from it both fp32 sides are.
    """
    tokens = stored.queries.shape[1]
    right = reference.run(stored.token_ids, attention=True)
    attention = compare_attention(stored.queries, stored.keys, right.attention)
    row = {
        "query row error": max_relative_row_error(stored.queries, right.queries[:, :tokens]),
        "key row error": max_relative_row_error(stored.keys, right.keys[:, :tokens]),
        "attention error": attention.weight_error,
        "beyond 1e-5": attention.beyond / attention.seen,
        "sink error": attention.mass_error,
    }
    if exact is not None:
        truth = exact.run(stored.token_ids, attention=True).attention
        ours = compare_attention(stored.queries, stored.keys, truth)
        row["stored vs float64"] = ours.weight_error
        row["eager vs float64"] = max(map(largest_difference, right.attention, truth))
    rows = max(row["query row error"], row["key row error"])
    print(
        f"  {stored.name}: every row of queries and keys compared, max error {rows:.1e}; every attention weight, "
        f"{attention.weight_error:.1e}",
        flush=True,
    )
    return row, attention


QUERIES, SINK, MAP = PICTURES = ("queries.png", "attention-sink.png", "attention-map.png")


def draw(stored: Stored, mass: torch.Tensor, folder: Path) -> None:
    """The pictures of one prompt: norms of all queries, the sink of all heads, the map of the head in the middle."""
    prompt = f"the prompt “{stored.name}”"
    draw_query_norms(stored.queries, folder / QUERIES, f"SmolLM2-135M: queries of {prompt}")
    draw_sink_mass(
        mass,
        folder / SINK,
        f"SmolLM2-135M: percent of attention on the first four tokens of {prompt}, from stored Q and K",
    )
    layer, head = median_head(mass)
    draw_causal_map(
        attention_weights(stored.queries[layer], stored.keys[layer])[head],
        folder / MAP,
        f"SmolLM2-135M: attention of layer {layer}, head {head} on {prompt}, from stored Q and K",
    )


def main() -> None:
    """Retrieve, compare, draw, and write what came out to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--server-url", required=True)
    parser.add_argument("--http-url", required=True)
    parser.add_argument("--engine-report", type=Path, required=True)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--float64", choices=("yes", "no"), default="no")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    requests = json.loads(options.engine_report.read_text())["requests"]

    with connect(options.server_url, options.http_url, options.model) as cache:
        stored, speed = retrieve_all(cache, requests)
    reference = Reference(Path(options.model))
    exact = Reference(Path(options.model), torch.float64) if options.float64 == "yes" else None
    rows, masses = [], []
    for one, request in zip(stored, requests, strict=True):
        errors, attention = check(one, reference, exact)
        masses.append(attention.mass)
        expected = expected_retrieval(one.token_ids, requests)
        rows.append(
            {
                "prompt": one.name,
                "tokens": len(one.token_ids),
                "cached": request["cached_tokens"],
                "retrieved": one.queries.shape[1],
                "expected": expected,
                **errors,
            }
        )
    longest = max(range(len(stored)), key=lambda index: stored[index].queries.shape[1])
    draw(stored[longest], masses[longest], options.pictures)
    options.out.write_text(
        json.dumps(
            {
                "rows": rows,
                "tokens_expected": sum(expected_capture(request) for request in requests),
                "retrieve_gb_s": speed,
                "pictures": PICTURES,
                "sink_mass": masses[longest].tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
