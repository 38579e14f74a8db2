"""Keys, values and attention outputs of the real engine, and what is selected of them; every row against transformers.

One daemon sees the same prompts three times: from an engine that captures one layer, from one that captures two, and
from one that captures all layers of all features.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e import matrix_document
from tests.e2e.test_vllm import IN_PROCESS, MODEL, ROOT, TRANSFER, job, prompt, run

pytestmark = pytest.mark.vllm

CHUNK, BLOCK, LAYERS = 64, 32, 30
TOLERANCE = 5e-5
FEATURES = ("query", "key", "value", "attention_output")
Batches = tuple[tuple[tuple[int, int], ...], ...]
"""(length, seed) of each prompt of each `generate` call."""
BATCHES: Batches = (((150, 1), (70, 2)), ((150, 1), (190, 3)))
LONGER: Batches = (((230, 1),),)
LLM = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": BLOCK}
ITEM_BYTES = 4
"""Of the models' dtype, float32."""
TITLE = "## Selection"
HEAD = """\
The same requests to three engines with SmolLM2-135M (fp32, chunks of 64 tokens) and one server, one after the other
(`tests/e2e/test_vllm_features.py`). The bytes are those of queries by the counters of `/status`: *ring* is blocks x
tokens x layers x elements x 4 of `q_context_meta` (8 bytes a token for stamps come on top), *stored* is `bytes` of
`models`, *retrieved* what `retrieved_bytes` of `reads` grew by when all requests were read. The three layouts lie side
by side; each has every token, its rows are compared with transformers, and no result is out of two of them.

| `lmcache.q.layers` | captured tokens | ring bytes | stored bytes | retrieved bytes |
|---|---|---|---|---|
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(pool_bytes=512 << 20, chunk_size=CHUNK) as running:
        yield running


class Run:
    """One engine's run: what it answered, and what the daemon says of its rings and its objects."""

    def __init__(
        self, daemon: RunningDaemon, folder: Path, sizes: Batches, **switches: Any
    ) -> None:
        before = daemon.status()
        batches = [[prompt(*size) for size in batch] for batch in sizes]
        extra = {TRANSFER: True, "lmcache.q.server_url": daemon.url, **switches}
        more = {"max_tokens": 20, "look_at": daemon.http_url}
        the_job = job(daemon, folder, batches=batches, llm=LLM, extra=extra, **more)
        self.report, _ = run(the_job, **IN_PROCESS)
        self.requests = self.report["requests"]
        rings = [worker["q_ring_layout"] for worker in self.report["workers"].values()]
        self.ring_bytes = {ring["layout"]["feature"]: _bytes_of_rows(ring) for ring in rings}
        after = daemon.status()
        self.captured = _captured_queries(after) - _captured_queries(before)
        self.features = after["coverage"]["features"]
        known = {one["layout_id"] for one in before["models"]}
        self.stored = {
            one["layout"]["feature"]: one["bytes"]
            for one in after["models"]
            if one["layout_id"] not in known
        }


def _captured_queries(status: dict[str, Any]) -> int:
    features = status["coverage"]["features"]
    return int(features["transfer_query"]["captured"]) if features else 0


def _bytes_of_rows(ring: dict[str, Any]) -> int:
    assert ring["dtype"] == "float32"
    tokens = ring["num_blocks"] * ring["block_size"]
    return int(tokens * ring["num_layers"] * ring["hidden_dim"] * ITEM_BYTES)


SWITCHES: dict[str, dict[str, Any]] = {
    "one": {"lmcache.q.layers": "5"},
    "two": {"lmcache.q.layers": "1,9"},
    "all": {TRANSFER: [f"transfer_{feature}" for feature in FEATURES]},
}
"""What the engines select, in the order in which they run."""
LAYOUTS = ((5,), (1, 9), tuple(range(LAYERS)))


class Runs:
    """The runs by name, each done when it is first asked for."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self._daemon, self._folder = daemon, folder
        self._done: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._done:
            self._done[name] = Run(self._daemon, self._folder, BATCHES, **SWITCHES[name])
        return self._done[name]


@pytest.fixture(scope="module")
def runs(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    from demo.model import prepare

    prepare(ROOT / MODEL)
    return Runs(daemon, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def reference() -> Any:
    from demo.model import prepare
    from demo.reference import Reference

    prepare(ROOT / MODEL)
    return Reference(ROOT / MODEL)


def retrieved_bytes(daemon: RunningDaemon, done: Run, layers: tuple[int, ...]) -> int:
    """What the server counts as given out when all of a run's requests are read from the layout with these layers."""
    from lmcache_qclient.qcache import connect

    before = daemon.status()["reads"]["retrieved_bytes"]
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        (layout,) = (one for one in cache.layouts if one.layer_ids == layers)
        for request in done.requests:
            found = cache.retrieve(request["token_ids"], layout=layout)
            assert (found.layer_ids, found.num_tokens) == (layers, len(request["token_ids"]) - 1)
    return int(daemon.status()["reads"]["retrieved_bytes"] - before)


def test_one_layer_of_thirty_takes_a_thirtieth_of_everything(
    daemon: RunningDaemon, runs: Runs
) -> None:
    """To the byte, as the server counts: ring, stored objects, and what readers get."""
    query = "transfer_query"
    every = [runs[name] for name in SWITCHES]
    counted = []
    for done, layers in zip(every, LAYOUTS, strict=True):
        read = retrieved_bytes(daemon, done, layers)
        counted.append((done.ring_bytes[query], done.stored[query], read))
        print(f"layers {layers}: ring, stored, retrieved bytes {counted[-1]}")
    one, two, thirty = counted
    assert min(one) > 0
    assert thirty == tuple(LAYERS * count for count in one)
    assert two == tuple(2 * count for count in one)
    assert len({str(done.requests) for done in every}) == 1, "the same requests, to the token"
    for done, name, counts in zip(every, ("5", "1,9", "all"), counted, strict=True):
        matrix_document.write_row(TITLE, HEAD, f"`{name}`", done.captured, *counts)


def test_layouts_of_one_model_are_complete_and_never_mixed(
    daemon: RunningDaemon, runs: Runs, reference: Any
) -> None:
    """Layers [1, 9] first, all later. The server's account says that nothing of either is missing."""
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect

    for name in SWITCHES:
        assert runs[name].captured == runs[name].report["computed"] > 0
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        by_layers = {one.layer_ids: one for one in cache.layouts}
        assert set(by_layers) == set(LAYOUTS)
        assert all(layout.complete for layout in by_layers.values())
        for request in runs["two"].requests:
            tokens = request["token_ids"]
            right = reference.queries(tokens)
            for layer_ids, layout in by_layers.items():
                found = cache.retrieve(tokens, layout=layout)
                assert (found.layer_ids, found.num_tokens) == (layer_ids, len(tokens) - 1)
                wanted = right[list(layer_ids), :-1]
                assert max_relative_row_error(found.tensor, wanted) <= TOLERANCE
            found = cache.retrieve(tokens, layers=[9, 1])
            assert max_relative_row_error(found.tensor, right[[9, 1], :-1]) <= TOLERANCE


def test_what_one_layout_lacks_is_not_taken_from_another(
    daemon: RunningDaemon, runs: Runs, reference: Any, tmp_path: Path
) -> None:
    """Only layers [1, 9] have been captured of a longer prompt: with all layers a result ends where these end."""
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect

    before = [request["token_ids"][:-1] for request in runs["all"].requests]
    longer = Run(daemon, tmp_path, LONGER, **SWITCHES["two"])
    (tokens,) = (request["token_ids"] for request in longer.requests)
    everywhere = max(common(tokens, other) for other in before)
    assert 150 <= everywhere < len(tokens) - 1
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        found, selected = cache.retrieve(tokens), cache.retrieve(tokens, layers=[1, 9])
    right = reference.queries(tokens)
    assert (found.layer_ids, found.num_tokens) == (LAYOUTS[2], everywhere)
    assert (selected.layer_ids, selected.num_tokens) == ((1, 9), len(tokens) - 1)
    assert max_relative_row_error(found.tensor, right[:, :everywhere]) <= TOLERANCE
    assert max_relative_row_error(selected.tensor, right[[1, 9], :-1]) <= TOLERANCE


def test_every_row_of_every_feature(daemon: RunningDaemon, runs: Runs, reference: Any) -> None:
    from demo.attention import compare_attention
    from demo.audit import ATTENTION_TOLERANCE, BEYOND_TOLERANCE
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect
    from tests.e2e.reference_tensors import attention_tensors

    worst = dict.fromkeys(FEATURES, 0.0)
    attention = []
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        for request in runs["all"].requests:
            tokens = request["token_ids"]
            right = attention_tensors(reference, tokens)
            found = {one: cache.retrieve(tokens, feature=one) for one in FEATURES}
            for feature, ours in found.items():
                assert ours.num_tokens == len(tokens) - 1
                assert ours.layer_ids == tuple(range(LAYERS))
                assert not ours.nonfinite
                wanted = right.of(feature)[:, : ours.num_tokens]
                error = max_relative_row_error(ours.tensor, wanted)
                worst[feature] = max(worst[feature], error)
            of_stored = compare_attention(found["query"].tensor, found["key"].tensor, right.weights)
            of_theirs = compare_attention(right.query, right.key, right.weights)
            print(
                f"{found['key'].num_tokens} tokens: attention off by {of_stored.weight_error:.1e}, beyond 1e-5 "
                f"{of_stored.beyond} of {of_stored.seen}; eager's own rounding {of_theirs.weight_error:.1e}"
            )
            attention.append(of_stored)
    print(f"largest relative row error {worst}")
    assert found["key"].tensor.shape[2] == 3, "the KV heads"
    assert found["attention_output"].tensor.shape[2] == 9, "the query heads"
    assert max(worst.values()) <= TOLERANCE
    assert max(one.weight_error for one in attention) <= ATTENTION_TOLERANCE
    beyond, seen = (sum(getattr(one, name) for one in attention) for name in ("beyond", "seen"))
    assert beyond <= BEYOND_TOLERANCE * seen


def test_every_feature_has_an_account_of_its_own(runs: Runs) -> None:
    run = runs["all"]
    assert set(run.features) == {f"transfer_{feature}" for feature in FEATURES}
    for feature in FEATURES[1:]:
        coverage = run.features[f"transfer_{feature}"]
        assert coverage["computed"] == coverage["captured"] == run.report["computed"]
        assert coverage["pending"] == sum(coverage["lost"].values()) == 0
    assert set(run.ring_bytes) == set(run.features)


REQUESTS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"capture": False},
    {"capture": True, "tokens": "decode"},
    {"capture": True, "tokens": "all"},
    {"capture": True, "layer": [1]},
    {"capture": True, "layers": [1]},
    None,
    {"capture": True},
)


def common(one: list[int], other: list[int]) -> int:
    """Tokens that two sequences begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_tokens_sample_and_what_requests_say(tmp_path: Path) -> None:
    """The engine captures prompts, of half of the requests that say nothing."""
    from lmcache_qclient.qcache import connect
    from lmcache_qclient.vllm.selection import is_sampled

    with running_daemon(pool_bytes=512 << 20, chunk_size=CHUNK) as daemon:
        prompts = [prompt(80 + number, number + 1) for number in range(len(REQUESTS))]
        extra = {
            TRANSFER: True,
            "lmcache.q.server_url": daemon.url,
            "lmcache.q.tokens": "prompt",
            "lmcache.q.sample": 0.5,
        }
        params = [None if one is None else {"qserver": one} for one in REQUESTS]
        the_job = job(
            daemon,
            tmp_path,
            batches=[prompts],
            llm=LLM,
            extra=extra,
            max_tokens=30,
            kv_transfer_params=params,
        )
        report, log = run(the_job, **IN_PROCESS)
        expected = []
        for number, (asked, ids) in enumerate(zip(REQUESTS, prompts, strict=True)):
            sampled = is_sampled(str(number), 0.5)
            captures = sampled if asked is None else asked["capture"]
            wrong = asked is not None and bool({"layer", "layers"} & set(asked))
            tokens = "prompt" if asked is None else asked.get("tokens", "prompt")
            some = {"prompt": len(ids), "decode": 29, "all": len(ids) + 29}[tokens]
            expected.append(some if captures and not wrong else 0)
        coverage = daemon.status()["coverage"]
        lost = {reason: count for reason, count in coverage["lost"].items() if count}
        assert coverage["computed"] == report["computed"]
        assert coverage["captured"] == sum(expected)
        assert lost == {"not_selected": report["computed"] - sum(expected)}
        assert "unknown key layer; known: capture, tokens, layers" in log
        sequences = [request["token_ids"] for request in report["requests"]]
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            for sequence, some in zip(sequences, expected, strict=True):
                found = cache.lookup(sequence)
                gone = sum(miss.end - miss.start for miss in found.missing)
                # Two prompts may begin with the same tokens, whose rows are the same then.
                others = [other for other in sequences if other is not sequence]
                shared = max(common(sequence, other) for other in others)
                assert shared < 10
                assert some <= len(sequence) - gone <= some + shared
