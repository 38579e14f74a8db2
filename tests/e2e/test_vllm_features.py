"""Keys, values and attention outputs of the real engine, and what is selected of them; every row against transformers.

One daemon sees the same prompts three times: from an engine that captures one layer, from one that captures two, and
from one that captures all layers of all features.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon
from tests.e2e.test_vllm import IN_PROCESS, MODEL, ROOT, TRANSFER, job, prompt, run

pytestmark = pytest.mark.vllm

CHUNK, BLOCK, LAYERS = 64, 32, 30
TOLERANCE = 5e-5
FEATURES = ("query", "key", "value", "attention_output")
BATCHES = (((150, 1), (70, 2)), ((150, 1), (190, 3)))
LLM = {"max_num_batched_tokens": 96, "max_num_seqs": 8, "block_size": BLOCK}
RING = re.compile(r"(\w[\w ]*) ring: (\d+) blocks of (\d+) tokens, (\d+) layers x (\d+) elements")


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon(pool_bytes=512 << 20, chunk_size=CHUNK) as running:
        yield running


class Run:
    """One engine's run: what it answered, the sizes of its rings, and what the daemon says then."""

    def __init__(self, daemon: RunningDaemon, folder: Path, **switches: Any) -> None:
        before = daemon.status()
        batches = [[prompt(*sizes) for sizes in batch] for batch in BATCHES]
        extra = {TRANSFER: True, "lmcache.q.server_url": daemon.url, **switches}
        the_job = job(daemon, folder, batches=batches, llm=LLM, extra=extra, max_tokens=20)
        self.report, log = run(the_job, **IN_PROCESS)
        self.requests = self.report["requests"]
        self.ring_elements = {
            found[1].split()[-1] if found[1].endswith("query") else found[1]: int(found[2])
            * int(found[3])
            * int(found[4])
            * int(found[5])
            for found in RING.finditer(log)
        }
        after = daemon.status()
        self.features = after["coverage"]["features"]
        known = {one["layout_id"] for one in before["models"]}
        self.stored = {
            one["layout"]["feature"]: one["bytes"]
            for one in after["models"]
            if one["layout_id"] not in known
        }


SWITCHES: dict[str, dict[str, Any]] = {
    "one": {"lmcache.q.layers": "5"},
    "two": {"lmcache.q.layers": "1,9"},
    "all": {TRANSFER: [f"transfer_{feature}" for feature in FEATURES]},
}
"""What the engines select, in the order in which they run."""


class Runs:
    """The runs by name, each done when it is first asked for."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self._daemon, self._folder = daemon, folder
        self._done: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name not in self._done:
            self._done[name] = Run(self._daemon, self._folder, **SWITCHES[name])
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


def test_one_layer_of_thirty_takes_a_thirtieth_of_everything(
    daemon: RunningDaemon, runs: Runs
) -> None:
    from lmcache_qclient.qcache import connect

    one, _, every = (runs[name] for name in SWITCHES)
    assert one.ring_elements["query"] * LAYERS == every.ring_elements["query"]
    assert one.stored["transfer_query"] * LAYERS == every.stored["transfer_query"]
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        tokens = one.requests[0]["token_ids"]
        (layout,) = (one for one in cache.layouts if one.layer_ids == (5,))
        small = cache.retrieve(tokens, layout=layout)
        large = cache.retrieve(tokens)
        assert small.num_tokens == large.num_tokens == len(tokens) - 1
        assert small.tensor.nbytes * LAYERS == large.tensor.nbytes
        assert small.tensor.equal(large.tensor[5:6])


def test_layouts_of_one_model_are_complete_and_never_mixed(
    daemon: RunningDaemon, runs: Runs, reference: Any
) -> None:
    from demo.reference import max_relative_row_error
    from lmcache_qclient.qcache import connect

    assert all(runs[name].requests for name in SWITCHES)
    with connect(daemon.url, daemon.http_url, MODEL) as cache:
        by_layers = {one.layer_ids: one for one in cache.layouts}
        assert set(by_layers) == {(5,), (1, 9), tuple(range(LAYERS))}
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
    assert set(run.ring_elements) == {"query", "key", "value", "attention output"}


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
