"""Models of many shapes on the real engine: every stored row against transformers, every token in the account.

One engine a model, three schedules in it: prompts in several steps, the same prompts again behind prefix-cache hits,
and decode over a chunk's edge. With QSERVER_MATRIX=1 the outcomes are added to docs/capture-matrix.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e import matrix_document, tiny_models
from tests.e2e.test_vllm import IN_PROCESS, TRANSFER, job, run

pytestmark = pytest.mark.vllm

CHUNK, BLOCK = 64, 32
FP32, BF16 = 5e-5, 2e-2
TITLE = "## Shapes"
HEAD = """\
Tiny random models (`tests/e2e/tiny_models.py`), compared the same way by `tests/e2e/test_vllm_shapes.py`. One engine
each; its requests go through chunked prefill (64 tokens a step), prefix-cache hits where the engine has them, and
decode over a chunk's edge. Under *stored* stand layers x heads x elements, one entry for each shape. A token counts
once for each rank and shape.

| model | stored | ranks | dtype | cached tokens | computed | captured | rows compared | max rel. row error |
|---|---|---|---|---|---|---|---|---|
"""
SEEN = """
What else was tried, and does not run on stock vLLM 0.32 with a CPU, by errors of its own: Bamba (refused at start:
its Mamba layers are left to a Transformers backend that can't run them), Jamba (no `selective_scan_fwd` in the CPU's
kernels), Falcon-H1 (an index error in `mamba_mixer2` with two sequences in a step), Qwen3-Next in fp32 ("CPU GDN
attention requires BF16") and with linear heads of 32, MLA in fp32 (the CPU's kernels take bfloat16, and a latent vector
of 512 + 64 elements only), heads of 16, PP 2 in eager mode (`intermediate_tensors is not None` fails in the second
stage). In bfloat16 transformers itself is as far from its fp32 (Qwen3-Next: 2.5e-2). LFM2 in eager mode runs with wrong
RoPE: the CPU's kernel takes queries of two dimensions, and LFM2 passes three; here that kernel is switched off.
"""
"""Stands behind the table."""


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        name: for the table.
        config: a function of tiny_models.
        stored: (layers, heads, elements per head) of each shape, in order.
        tolerance: of a row, relative.
        llm: LLM arguments.
        cached: whether the engine's prefix cache has hits.
        parts: (layers, heads) of each rank, in the order of ranks; empty for one rank.
        rearrange: see `tiny_models.reference_queries`.
        lengths: of the first prompt, and of a later one that begins with it.
        processor: a flag of the processor that the engine's kernels need.
    """

    name: str
    config: Callable[[], Any]
    stored: tuple[tuple[tuple[int, ...], int, int], ...]
    tolerance: float = FP32
    llm: dict[str, Any] = field(default_factory=dict)
    cached: bool = True
    parts: tuple[tuple[tuple[int, ...], range], ...] = ()
    rearrange: Callable[[Any], Any] | None = None
    lengths: tuple[int, int] = (150, 190)
    processor: str = ""

    @property
    def dtype(self) -> str:
        return str(self.llm.get("dtype", "float32"))

    @property
    def ranks(self) -> int:
        return len(self.parts) or 1


def interleaved(q: Any) -> Any:
    """The engine's order in an MLA head: RoPE's pairs lie side by side; transformers has them half a head apart."""
    nope, rope = q[..., :64], q[..., 64:]
    half = rope.shape[-1] // 2
    pairs = rope.unflatten(-1, (2, half)).transpose(-1, -2).flatten(-2)
    import torch

    return torch.cat((nope, pairs), dim=-1)


CASES = (
    Case("Llama: grouped queries", tiny_models.llama, (((0, 1, 2, 3), 4, 32),)),
    Case("Qwen3: query norm, wide heads", tiny_models.qwen3, (((0, 1), 4, 32),)),
    Case(
        "Gemma3: one KV head, sliding window and full attention",
        tiny_models.gemma3,
        (((0, 1, 2, 3), 4, 32),),
    ),
    Case("Gemma3n: layers that share KV", tiny_models.gemma3n, (((0, 1, 2, 3), 4, 32),)),
    Case(
        "Gemma4: unlike layers, some of which share KV",
        tiny_models.gemma4,
        (((0, 2), 4, 32), ((1, 3), 4, 64)),
    ),
    Case(
        "DeepSeek-V3: MLA, yarn",
        tiny_models.deepseek,
        (((0, 1), 4, 128),),
        tolerance=BF16,
        llm={"dtype": "bfloat16"},
        rearrange=interleaved,
        processor="amx_tile",
    ),
    Case(
        "GraniteMoeHybrid: Mamba 2 and attention",
        tiny_models.granite,
        (((1, 3), 4, 32),),
    ),
    Case(
        "Qwen3-Next: gated delta net and attention, blocks of 480",
        tiny_models.qwen3_next,
        (((1,), 4, 256),),
        tolerance=3e-2,  # transformers' own bfloat16 is off by 2.5e-2 from its fp32
        llm={"dtype": "bfloat16"},
        lengths=(600, 640),
    ),
    Case(
        "LFM2: short convolution and attention",
        tiny_models.lfm2,
        (((1, 3), 4, 32),),
        # In eager mode vLLM's CPU kernel for RoPE turns queries of three dimensions, as LFM2 has them, wrongly.
        llm={"compilation_config": {"custom_ops": ["-rotary_embedding"]}},
    ),
    Case(
        "Llama, TP 2",
        tiny_models.llama,
        (((0, 1, 2, 3), 4, 32),),
        llm={"tensor_parallel_size": 2},
        parts=(((0, 1, 2, 3), range(2)), ((0, 1, 2, 3), range(2, 4))),
    ),
    Case(
        "Llama, PP 2, compiled",
        tiny_models.llama,
        (((0, 1, 2, 3), 4, 32),),
        llm={"pipeline_parallel_size": 2, "enforce_eager": False},
        parts=(((0, 1), range(4)), ((2, 3), range(4))),
    ),
)


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids; a longer prompt of a seed goes on where a shorter one ends."""
    choose = random.Random(seed)
    return [choose.randrange(10, tiny_models.VOCABULARY) for _ in range(length)]


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon with small chunks."""
    with running_daemon(pool_bytes=64 << 20, chunk_size=CHUNK) as running:
        yield running


def compared(
    daemon: RunningDaemon, report: Mapping[str, Any], case: Case, folder: Path
) -> tuple[int, float]:
    """Rows of all requests that are stored, and the largest error of any. All but the last token must be there."""
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect

    rows, worst = 0, 0.0
    with connect(daemon.url, daemon.http_url) as cache:
        for request in report["requests"]:
            found = cache.retrieve(request["token_ids"])
            shapes = tuple((group.layer_ids, *group.tensor.shape[2:]) for group in found.groups)
            assert shapes == case.stored
            assert found.num_tokens == len(request["token_ids"]) - 1
            right = tiny_models.reference_queries(folder, request["token_ids"], case.rearrange)
            for group in found.groups:
                for layer in group.layer_ids:
                    of_layer = right[layer][None, : found.num_tokens]
                    worst = max(worst, max_relative_row_error(found.layer(layer)[None], of_layer))
                    rows += found.num_tokens
    return rows, worst


def stored_parts(daemon: RunningDaemon) -> tuple[tuple[tuple[int, ...], range], ...]:
    """(layers, heads) that each rank has stored, as the server knows them."""
    layouts = [model["layout"] for model in daemon.status()["models"]]
    layouts.sort(key=lambda layout: (layout["pp_rank"], layout["tp_rank"]))
    return tuple(
        (
            tuple(layout["layer_ids"]),
            range(layout["first_head"], layout["first_head"] + layout["num_heads"]),
        )
        for layout in layouts
    )


def note(
    case: Case, report: Mapping[str, Any], coverage: Mapping[str, Any], rows: int, worst: float
) -> None:
    """One line of the document."""
    stored = " and ".join(f"{len(layers)} x {heads} x {dim}" for layers, heads, dim in case.stored)
    cached = sum(request["cached_tokens"] for request in report["requests"])
    cells = [
        case.name,
        stored,
        case.ranks,
        case.dtype,
        cached,
        coverage["computed"],
        coverage["captured"],
        rows,
        f"{worst:.1e}",
    ]
    matrix_document.write_row(TITLE, HEAD, *cells, behind=SEEN)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_shape(case: Case, daemon: RunningDaemon, tmp_path: Path) -> None:
    if case.processor not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"the engine's kernels for it need a processor with {case.processor}")
    import torch

    folder = tiny_models.make_model(case.config(), tmp_path / "model", getattr(torch, case.dtype))
    the_job = job(
        daemon,
        tmp_path,
        model=str(folder),
        batches=[[prompt(length, 1), prompt(70, 2)] for length in case.lengths],
        max_tokens=70,
        llm={
            "max_num_batched_tokens": 64,
            "max_num_seqs": 4,
            "block_size": BLOCK,
            "max_model_len": 1024,
            "skip_tokenizer_init": True,
            **case.llm,
        },
        extra={TRANSFER: True, "lmcache.q.server_url": daemon.url},
    )
    threads = {"OMP_NUM_THREADS": "1"} if case.ranks > 1 else {}  # two ranks spin on two cores
    report, _ = run(the_job, **{**IN_PROCESS, **threads})
    coverage = daemon.status()["coverage"]
    rows, worst = compared(daemon, report, case, folder)
    note(case, report, coverage, rows, worst)
    assert rows
    assert worst <= case.tolerance
    assert case.parts in ((), stored_parts(daemon))
    counted = report["computed"] * case.ranks * len(case.stored)
    assert (coverage["computed"], coverage["captured"], coverage["pending"]) == (
        counted,
        counted,
        0,
    )
    assert (report["requests"][-2]["cached_tokens"] > 0) is case.cached
