"""What the scheduler may do, on the real engine: every stored row against transformers, every token in the account.

Chunks of 64 tokens over engine blocks of 32, so that short requests cross many edges. With QSERVER_MATRIX=1 the
outcomes are written to docs/capture-matrix.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e import matrix_document
from tests.e2e.test_vllm import IN_PROCESS, MODEL, ROOT, TRANSFER, job, prompt, run

pytestmark = pytest.mark.vllm

CHUNK, BLOCK = 64, 32
TOLERANCE = 5e-5
TITLE = matrix_document.TITLES[0]
HEAD = """\
Stock vLLM 0.32 on a CPU, SmolLM2-135M in fp32, chunks of 64 tokens, engine blocks of 32. Each row is one run of
`tests/e2e/test_vllm_matrix.py` (made by `QSERVER_MATRIX=1 make test-vllm`): every stored row of every layer is compared
with transformers; *computed* is counted from the scheduler's `num_scheduled_tokens`, outside of our ledger. LoRA
adapters, prompt embeddings and pictures are compared the same way by `tests/e2e/test_vllm_identity.py`, vLLM's OpenAI
server by `tests/e2e/test_openai_server.py`.

| case | computed | captured | lost | rows compared | max rel. row error |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Case:
    """One way to drive the engine.

    Attributes:
        name: for the table.
        batches: prompts of each `generate` call.
        llm: LLM arguments.
        max_tokens: tokens to sample per request.
        more: more of the job.
        must_lose: reasons that must show, else the case did not happen.
        shared: tokens of a system prompt before each prompt.
        cached: tokens that the engine's prefix cache must have had for the last request.
        must_say: what the engine's log must say.
    """

    name: str
    batches: tuple[tuple[tuple[int, int], ...], ...]
    """(length, seed) of each prompt, after what all share."""
    llm: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 4
    more: dict[str, Any] = field(default_factory=dict)
    must_lose: tuple[str, ...] = ()
    shared: int = 0
    cached: int = 0
    must_say: str = ""


NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
DRAFT_MODEL = {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 2}
CASES = (
    Case("whole prefill", (((300, 1), (129, 2), (64, 3), (63, 4)),)),
    Case("chunked prefill, budget 50", (((300, 1), (129, 2)),), {"max_num_batched_tokens": 50}),
    Case("prefix-cache hits", (((200, 1),), ((200, 1), (190, 1))), cached=160),
    Case(
        "short questions after a system prompt of 1,000 tokens",
        (((9, 1),), ((15, 2), (23, 3), (9, 1))),
        shared=1000,
        cached=992,
    ),
    Case("C29: batches, again and again", tuple(((40 + n, n), (90, n + 5)) for n in range(1, 4))),
    Case("decode across chunk edges", (((50, 1), (70, 2)),), max_tokens=150),
    Case(
        "preemption and resume",
        (((100, 1), (90, 2), (110, 3)),),
        {"num_gpu_blocks_override": 16, "max_num_seqs": 3, "max_model_len": 400},
        max_tokens=120,
        must_lose=("recomputed",),
    ),
    Case(
        "n-gram speculative decoding",
        (((120, 1), (90, 5)),),
        {"speculative_config": NGRAM},
        max_tokens=90,
        must_lose=("rejected_draft",),
    ),
    Case(
        "speculative decoding with a draft model",
        (((120, 1), (90, 5)),),
        {"speculative_config": DRAFT_MODEL, "gpu_memory_utilization": 0.5},
        max_tokens=40,
    ),
    Case("compiled", (((150, 1),),), {"enforce_eager": False}, max_tokens=30),
    Case(
        "bytes inline: the server's socket is out of reach",
        (((300, 1), (129, 2)), ((300, 1),)),
        {"max_num_batched_tokens": 128},
        max_tokens=30,
        more={"out_of_reach": True},
        must_say="go inline",
    ),
    Case("beside another connector", (((150, 1),), ((150, 1),)), more={"beside_another": True}),
)


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with small chunks."""
    with running_daemon(pool_bytes=512 << 20, chunk_size=CHUNK, allow_inline=True) as running:
        yield running


def compared(daemon: RunningDaemon, report: dict[str, Any], drafts: bool) -> tuple[int, float]:
    """Rows of all requests that are stored, and the largest error of any.

    All but the last token are there: that is sampled and not computed. With drafts the last but one may be unproven.
    """
    from demo.reference import max_relative_row_error, reference_queries
    from lmcache_qclient.qcache import connect

    rows, worst = 0, 0.0
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request in report["requests"]:
            found = cache.retrieve(request["token_ids"])
            assert found.num_tokens >= len(request["token_ids"]) - 1 - drafts
            if found.num_tokens:
                right = reference_queries(ROOT / MODEL, request["token_ids"])
                worst = max(
                    worst, max_relative_row_error(found.tensor, right[:, : found.num_tokens])
                )
                rows += found.tensor.shape[0] * found.num_tokens
    return rows, worst


def note(case: Case, coverage: dict[str, Any], rows: int, worst: float) -> None:
    """One line of the document."""
    lost = ", ".join(f"{reason} {count}" for reason, count in coverage["lost"].items() if count)
    counts = (coverage["computed"], coverage["captured"])
    matrix_document.write_row(TITLE, HEAD, case.name, *counts, lost, rows, f"{worst:.1e}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_way(case: Case, daemon: RunningDaemon, tmp_path: Path) -> None:
    system = prompt(case.shared, 0)
    batches = [[system + prompt(*sizes) for sizes in batch] for batch in case.batches]
    more = dict(case.more)
    if "beside_another" in more:
        more["beside_another"] = str(tmp_path / "other")
    if more.pop("out_of_reach", False):
        Path(daemon.lifeline).rename(daemon.lifeline + ".away")
    llm = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "block_size": BLOCK, **case.llm}
    extra = {TRANSFER: True, "lmcache.q.server_url": daemon.url}
    the_job = job(
        daemon,
        tmp_path,
        batches=batches,
        llm=llm,
        extra=extra,
        max_tokens=case.max_tokens,
        **more,
    )
    report, log = run(the_job, **IN_PROCESS)
    assert case.must_say in log
    coverage = daemon.status()["coverage"]
    rows, worst = compared(daemon, report, "speculative_config" in case.llm)
    note(case, coverage, rows, worst)
    assert coverage["computed"] == report["computed"]
    assert coverage["pending"] == 0
    assert coverage["captured"] + sum(coverage["lost"].values()) == report["computed"]
    assert rows
    assert worst <= TOLERANCE
    assert report["requests"][-1]["cached_tokens"] >= case.cached
    for reason in case.must_lose:
        assert coverage["lost"][reason] > 0, f"the case did not happen: {coverage['lost']}"
