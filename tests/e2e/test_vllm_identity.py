"""What makes equal token ids mean different tensors, on the real engine: rows right for each, kept apart, listed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e.test_vllm import IN_PROCESS, MODEL, ROOT, job, prompt

pytestmark = pytest.mark.vllm

CHUNK = 64
TOLERANCE = 5e-5
LLM = {"max_num_batched_tokens": 150, "max_num_seqs": 8, "block_size": 32, "max_model_len": 1024}


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(chunk_size=CHUNK, pool_bytes=512 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def model() -> Path:
    """The checkpoint."""
    from demo.model import prepare

    return prepare(ROOT / MODEL)


def run(daemon: RunningDaemon, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run tests/e2e/identity_process.py to its end: what it wrote."""
    the_job = job(daemon, folder, **{"llm": LLM, **changes})
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.identity_process"],
        input=json.dumps(the_job),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **IN_PROCESS},
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    report: dict[str, Any] = json.loads(Path(the_job["out"]).read_text())
    return report


def check_account(daemon: RunningDaemon, report: dict[str, Any]) -> None:
    """Every token that the scheduler computed is captured."""
    coverage = daemon.status()["coverage"]
    assert coverage["computed"] == report["computed"]
    assert (coverage["captured"], coverage["pending"]) == (report["computed"], 0), coverage


def test_c25_loras_on_the_real_engine(daemon: RunningDaemon, model: Path, tmp_path: Path) -> None:
    """No adapter, two adapters, and the first one's name with another path: one text, one salt."""
    from demo.reference import Reference, max_relative_row_error
    from lmcache_qclient.qcache import connect
    from tests.e2e.lora_adapter import MergedReference, make_adapter

    folders = [make_adapter(tmp_path / f"adapter-{seed}", model, seed) for seed in (1, 2, 3)]
    tokens = prompt(200, 1)
    loras = [None, ["one", 1, str(folders[0])], ["two", 2, str(folders[1])]]
    together = [
        {"token_ids": tokens, "salt": "s", **({"lora": lora} if lora else {})} for lora in loras
    ]
    again = [{"token_ids": tokens, "salt": "s", "lora": ["one", 3, str(folders[2])]}]
    llm = {**LLM, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
    report = run(daemon, tmp_path, llm=llm, batches=[together, again])
    check_account(daemon, report)

    references = [Reference(model), *(MergedReference(model, folder) for folder in folders)]
    tensors = []
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request, lora, reference in zip(
            report["requests"], [None, *folders], references, strict=True
        ):
            whole = request["prompt"] + request["output"]
            found = cache.retrieve(whole, cache_salt="s", lora=lora)
            assert found.num_tokens == len(whole) - 1
            error = max_relative_row_error(
                found.tensor, reference.queries(whole)[:, : found.num_tokens]
            )
            print(f"lora {lora}: {found.num_tokens} tokens, max relative row error {error:.1e}")
            assert error <= TOLERANCE
            tensors.append(found.tensor[:, : len(tokens)])
        for first in range(4):
            for second in range(first):
                assert max_relative_row_error(tensors[first], tensors[second]) > 0.1
        listed = cache.identities(tokens)
        assert {one.lora.source if one.lora else None for one in listed} == {
            None,
            *map(str, folders),
        }
        assert {one.num_tokens for one in listed} == {len(tokens)}
        assert all(one.lora is None or one.lora.digest for one in listed)
        # The same adapter at another place is the same adapter.
        moved = shutil.copytree(folders[1], tmp_path / "elsewhere")
        assert cache.lookup(tokens, cache_salt="s", lora=moved).num_tokens == len(tokens)


@pytest.mark.parametrize("preempted", [False, True], ids=["", "preempted and resumed"])
def test_prompt_embeddings_on_the_real_engine(
    daemon: RunningDaemon, model: Path, tmp_path: Path, preempted: bool
) -> None:
    """Two prompts of embeddings, one half of token ids, and token ids 0 in their places: kept apart, rows right."""
    import torch

    from demo.reference import Reference, max_relative_row_error
    from lmcache_qclient.qcache import connect, embeds_item

    reference = Reference(model)
    table = reference.model.model.embed_tokens.weight.detach()
    generator = torch.Generator().manual_seed(5)
    tokens = prompt(150, 1)

    def soft(seed: int) -> torch.Tensor:
        plain = table[torch.tensor(prompt(150, seed))]
        noise = torch.randn(plain.shape, generator=generator)
        return torch.add(plain, noise, alpha=0.2 * float(plain.std()))

    first, second, mixed = soft(2), soft(3), soft(4)
    is_token = [position < 70 or 90 <= position < 120 for position in range(150)]
    blended = torch.where(torch.tensor(is_token)[:, None], table[torch.tensor(tokens)], mixed)
    requests: list[dict[str, Any]] = []
    for name, embeddings in (("first", first), ("second", second), ("mixed", mixed)):
        torch.save(embeddings, tmp_path / f"{name}.pt")
        requests.append({"embeds": str(tmp_path / f"{name}.pt"), "salt": "s"})
    requests[2].update(token_ids=tokens, is_token=is_token)
    requests.append({"token_ids": [0] * 150, "salt": "s"})
    few = {"num_gpu_blocks_override": 18, "max_model_len": 400} if preempted else {}
    report = run(
        daemon,
        tmp_path,
        llm={**LLM, "enable_prompt_embeds": True, **few},
        batches=[requests[:2], requests],
        max_tokens=50 if preempted else 4,
    )

    known = [token if kept else 0 for token, kept in zip(tokens, is_token, strict=True)]
    runs = [embeds_item(mixed[70:90], 70), embeds_item(mixed[120:], 120)]
    cases = [
        ([0] * 150, [embeds_item(first)], first),
        ([0] * 150, [embeds_item(second)], second),
        (known, runs, blended),
        ([0] * 150, [], table[torch.zeros(150, dtype=torch.long)]),
    ]
    tensors = []
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request, (ids, mm, embeddings) in zip(report["requests"][2:], cases, strict=True):
            whole = ids + request["output"]
            found = cache.retrieve(whole, cache_salt="s", mm=mm)
            assert found.num_tokens == len(whole) - 1
            given = torch.cat([embeddings, table[torch.tensor(request["output"])]])
            hook = reference.model.model.embed_tokens.register_forward_hook(
                lambda module, inputs, output, given=given: given[None]
            )
            right = reference.queries(whole)
            hook.remove()
            # What the model makes of 150 equal tokens is ill-conditioned: behind the prompt transformers in fp32 and in
            # fp64 differ by 1e-4.
            count = found.num_tokens if mm else 150
            error = max_relative_row_error(found.tensor[:, :count], right[:, :count])
            print(f"{len(mm)} embeddings: {count} tokens, max relative row error {error:.1e}")
            assert error <= TOLERANCE
            tensors.append(found.tensor[:, :150])
        assert max_relative_row_error(tensors[0], tensors[1]) > 0.1
        listed = cache.identities([0] * 150)
        assert {one.mm for one in listed} == {(), *(tuple(mm) for _, mm, _ in cases[:2])}
        assert {one.num_tokens for one in listed} == {150}
        (one,) = [one for one in cache.identities(known) if one.num_tokens == 150]
        assert one.mm == tuple(runs)
    coverage = daemon.status()["coverage"]
    again = coverage["lost"]["recomputed"]
    assert coverage["captured"] + again == coverage["computed"] == report["computed"]
    assert bool(again) == preempted


def test_c26_pictures_on_the_real_engine(tmp_path: Path) -> None:
    """Identical text with two pictures, in turn two of a conversation."""
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect
    from tests.e2e.tiny_idefics import (
        PLACEHOLDERS,
        make_model,
        make_picture,
        reference_queries,
        word,
    )

    idefics = make_model(tmp_path / "idefics")
    red, blue = (
        make_picture(tmp_path / f"{name}.png", seed) for name, seed in (("a", 1), ("b", 2))
    )
    turn_one = " ".join(map(word, range(40)))
    question = " ".join(map(word, range(100, 150)))
    asked = f"{turn_one} <image> {question}"
    pictures: list[list[Path]] = [[red], [blue], [], [red, blue], [red]]
    texts = [asked, asked, question, f"{asked} <image> w7 w8", asked]
    requests = [
        {"text": text, "images": list(map(str, shown))}
        for text, shown in zip(texts, pictures, strict=True)
    ]
    llm = {**LLM, "max_model_len": 256, "limit_mm_per_prompt": {"image": 2}}
    with running_daemon(chunk_size=16, pool_bytes=64 << 20) as daemon:
        batches = [requests[:2], requests[2:]]
        report = run(daemon, tmp_path, model=str(idefics), llm=llm, batches=batches)
        coverage = daemon.status()["coverage"]
        assert coverage["captured"] == coverage["computed"] == report["computed"]
        done = report["requests"]
        assert done[0]["prompt"] == done[1]["prompt"], "the placeholders are equal"
        assert len(done[0]["prompt"]) == 40 + PLACEHOLDERS + 50
        assert done[4]["cached_tokens"] > 40, "the picture is in the engine's own key as well"
        with connect(daemon.url, daemon.http_url, str(idefics)) as cache:
            prompt_ids = done[0]["prompt"]
            listed = cache.identities(prompt_ids)
            assert [one.num_tokens for one in listed] == [len(prompt_ids)] * 2
            names = [one.mm for one in listed]
            assert all(len(mm) == 1 and mm[0].offset == 40 for mm in names)
            assert names[0] != names[1]
            two = {one.mm for one in cache.identities(done[3]["prompt"]) if len(one.mm) == 2}
            ((first, second),) = two
            by_picture = {red: first.digest, blue: second.digest}
            assert {mm[0].digest for mm in names} == set(by_picture.values())
            tensors = []
            for request, shown in zip(done, pictures, strict=True):
                whole = request["prompt"] + request["output"]
                offsets = [40, 40 + PLACEHOLDERS + 50]
                mm = [(by_picture[path], at) for path, at in zip(shown, offsets, strict=False)]
                found = cache.retrieve(whole, mm=mm)
                assert found.num_tokens == len(whole) - 1
                right = reference_queries(idefics, whole, shown)[:, : found.num_tokens]
                error = max_relative_row_error(found.tensor, right)
                print(
                    f"{len(shown)} pictures: {found.num_tokens} tokens, max relative row error {error:.1e}"
                )
                assert error <= TOLERANCE
                tensors.append(found.tensor)
            assert max_relative_row_error(tensors[0][:, 40:109], tensors[1][:, 40:109]) > 0.1
            # It leaves turn one's chunks alone: they are found by their token ids, up to where the picture begins.
            assert cache.lookup(prompt_ids).num_tokens == 40
