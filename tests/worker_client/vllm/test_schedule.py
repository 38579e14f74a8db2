"""The scheduler's side: what vLLM hands out piecemeal becomes whole `StepMeta`s. Block 4, reference group 1."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_qclient.capture.step import FinishedRequest, RequestStep, StepMeta
from lmcache_qclient.identity.embeddings import embeds_item
from lmcache_qclient.vllm.schedule import ScheduleTracker
from lmcache_qprotocol.identity import PLAIN, Identity, ItemIdentity, LoraIdentity
from lmcache_qprotocol.reasons import LossReason as Loss


@dataclass
class Request:
    """vLLM's `Request`, as far as it is read."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: Any = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    resumable: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def new(name: str, start: int, blocks: list[int]) -> Any:
    """`NewRequestData`; group 0 is another group."""
    return SimpleNamespace(
        req_id=name, num_computed_tokens=start, block_ids=([900, 901, 902], blocks)
    )


@dataclass
class Cached:
    """`CachedRequestData`."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[Any] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


def cached(*rows: tuple[str, int, list[int] | None], resumed: tuple[str, ...] = ()) -> Cached:
    """Rows are (id, first position, new blocks or None)."""
    return Cached(
        [name for name, _, _ in rows],
        set(resumed),
        [None if blocks is None else ([900], blocks) for _, _, blocks in rows],
        [start for _, start, _ in rows],
    )


def output(
    counts: dict[str, int], new: tuple[Any, ...] = (), old: Cached | None = None, **drafts: int
) -> Any:
    """`SchedulerOutput`; `drafts` are numbers of draft tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=old or Cached(),
        num_scheduled_tokens=counts,
        scheduled_spec_decode_tokens={name: [7] * count for name, count in drafts.items()},
    )


@pytest.fixture
def tracker() -> ScheduleTracker:
    return ScheduleTracker(group_index=1, block_size=4)


def started(tracker: ScheduleTracker, **more: Any) -> tuple[Request, RequestStep]:
    """Request a of ten tokens; its first step computes [0, 6)."""
    request = Request("a", list(range(100, 110)), **more)
    tracker.request_allocated(request)
    (step,) = tracker.build(output({"a": 6}, (new("a", 0, [11, 12]),))).requests
    return request, step


def test_a_new_request(tracker: ScheduleTracker) -> None:
    _, step = started(tracker, cache_salt="salt")
    assert step == RequestStep(
        "a", 0, 6, (11, 12), 6, tuple(range(100, 110)), first=True, cache_salt="salt"
    )


def test_a_cached_request_brings_new_blocks_or_none_and_each_token_once(
    tracker: ScheduleTracker,
) -> None:
    request, _ = started(tracker, cache_salt="salt")
    (step,) = tracker.build(output({"a": 4}, old=cached(("a", 6, [13])))).requests
    assert step == RequestStep("a", 6, 4, (12, 13), 10, tokens_from=10)
    request.all_token_ids += [110]
    (step,) = tracker.build(output({"a": 1}, old=cached(("a", 10, None)))).requests
    assert step == RequestStep("a", 10, 1, (13,), 11, (110,), tokens_from=10)


@pytest.mark.parametrize(
    ("start", "count", "blocks"),
    [
        (0, 1, (11,)),
        (3, 1, (11,)),
        (3, 2, (11, 12)),
        (4, 4, (12,)),
        (7, 6, (12, 13, 14)),
        (12, 4, (14,)),
    ],
)
def test_block_ids_cover_the_step_and_no_more(
    tracker: ScheduleTracker, start: int, count: int, blocks: tuple[int, ...]
) -> None:
    tracker.request_allocated(Request("a", list(range(16))))
    data = new("a", start, [11, 12, 13, 14])
    (step,) = tracker.build(output({"a": count}, (data,))).requests
    assert step.block_ids == blocks
    assert (step.start, step.count, step.first) == (start, count, True)


def test_drafts_lie_at_or_above_settled(tracker: ScheduleTracker) -> None:
    request, _ = started(tracker)
    request.all_token_ids += [110]
    (step,) = tracker.build(output({"a": 4}, old=cached(("a", 10, [13, 14])), a=3)).requests
    assert (step.count, step.settled, step.new_tokens) == (4, 11, (110,))


def test_resumed_as_a_cached_request(tracker: ScheduleTracker) -> None:
    """Runner V1: all blocks come anew."""
    request, _ = started(tracker)
    request.all_token_ids += [110]
    tracker.request_allocated(request)
    rows = cached(("a", 4, [21, 22, 23]), resumed=("a",))
    (step,) = tracker.build(output({"a": 7}, old=rows)).requests
    assert step == RequestStep("a", 4, 7, (22, 23), 11, (110,), resumed=True, tokens_from=10)


def test_resumed_as_a_new_request(tracker: ScheduleTracker) -> None:
    """Runner V2."""
    request, _ = started(tracker, cache_salt="salt")
    request.all_token_ids += [110]
    tracker.request_allocated(request)
    (step,) = tracker.build(output({"a": 11}, (new("a", 0, [21, 22, 23]),))).requests
    assert step == RequestStep("a", 0, 11, (21, 22, 23), 11, (110,), resumed=True, tokens_from=10)


def test_the_end_comes_with_the_next_step_and_the_last_tokens(tracker: ScheduleTracker) -> None:
    request, _ = started(tracker)
    request.all_token_ids += [110, 111]
    tracker.request_finished(request)
    (end,) = tracker.build(output({})).finished
    assert end == FinishedRequest("a", 12, (110, 111), 10)
    assert tracker.build(output({})) == StepMeta()
    tracker.request_finished(request)
    assert tracker.build(output({})) == StepMeta()


def test_a_request_that_never_ran_has_no_end(tracker: ScheduleTracker) -> None:
    request = Request("a", [1, 2])
    tracker.request_finished(request)
    tracker.request_allocated(request)
    tracker.request_finished(request)
    assert tracker.build(output({})) == StepMeta()


def test_an_id_used_again_is_a_new_request(tracker: ScheduleTracker) -> None:
    request, _ = started(tracker)
    tracker.request_finished(request)
    again = Request("a", [1, 2, 3], cache_salt="other")
    tracker.request_allocated(again)
    meta = tracker.build(output({"a": 3}, (new("a", 0, [31]),)))
    assert [end.num_tokens for end in meta.finished] == [10]
    assert meta.requests == (
        RequestStep("a", 0, 3, (31,), 3, (1, 2, 3), first=True, cache_salt="other"),
    )


def test_a_request_that_was_never_announced_is_counted_and_not_captured(
    tracker: ScheduleTracker,
) -> None:
    old = cached(("x", 7, [1]))
    (step,) = tracker.build(output({"x": 1}, old=old)).requests
    assert (step.start, step.count, step.first, step.skip) == (7, 1, True, Loss.CAPTURE_DISABLED)
    (step,) = tracker.build(output({"y": 2}, (new("y", 0, [41]),))).requests
    assert (step.start, step.count, step.first, step.skip) == (0, 2, True, Loss.CAPTURE_DISABLED)
    tracker.request_finished(Request("x", [1]))
    assert tracker.build(output({})).finished == (FinishedRequest("x", skip=Loss.CAPTURE_DISABLED),)


# --- identity -------------------------------------------------------------------------------------


def _picture(identifier: str) -> SimpleNamespace:
    return SimpleNamespace(
        identifier=identifier, mm_position=SimpleNamespace(offset=3, length=4), modality="image"
    )


def _adapter(name: str, path: str = "/nowhere", lora_int_id: int = 1) -> SimpleNamespace:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=lora_int_id)


def test_lora_and_pictures_make_the_identity(tracker: ScheduleTracker) -> None:
    """C25, C26."""
    lora = SimpleNamespace(lora_name="adapter", lora_path="/adapters/1", lora_int_id=1)
    picture = SimpleNamespace(identifier="abc", mm_position=SimpleNamespace(offset=3, length=4))
    _, step = started(tracker, lora_request=lora, mm_features=[picture])
    assert step.identity == Identity(
        LoraIdentity("adapter", "/adapters/1"), (ItemIdentity("mm", "abc", 3),)
    )
    (step,) = tracker.build(output({"a": 1}, old=cached(("a", 6, None)))).requests
    assert step.identity == PLAIN, "told once"


@pytest.mark.parametrize(
    "more",
    [
        {"cache_salt": "x" * 4097},
        {"resumable": True},
        {"mm_features": [_picture("x" * 513)]},
        {"mm_features": [_picture("")]},
        {"mm_features": [_picture("x")] * 4097},
        {"lora_request": _adapter("x" * 513)},
        {"lora_request": _adapter("a", "x" * 4097)},
    ],
    ids=[
        "salt",
        "streaming",
        "item's name",
        "no item's name",
        "items",
        "lora's name",
        "lora's path",
    ],
)
def test_what_no_key_can_name_is_skipped(tracker: ScheduleTracker, more: dict[str, Any]) -> None:
    _, step = started(tracker, **more)
    assert (step.skip, step.cache_salt, step.identity) == (Loss.CAPTURE_DISABLED, "", PLAIN)
    (step,) = tracker.build(output({"a": 1}, old=cached(("a", 6, None)))).requests
    assert step.skip is None, "the ledger remembers"


def test_embeddings_are_items_where_they_stand(tracker: ScheduleTracker) -> None:
    embeddings = torch.arange(20, dtype=torch.float32).view(10, 2)
    _, step = started(tracker, prompt_embeds=embeddings)
    assert (step.skip, step.identity) == (None, Identity(None, (embeds_item(embeddings),)))


def test_embeddings_among_token_ids_are_an_item_a_run(tracker: ScheduleTracker) -> None:
    embeddings = torch.arange(20, dtype=torch.float32).view(10, 2)
    is_token = [False, True, True, False, False, False, True, True, True, False]
    _, step = started(tracker, prompt_embeds=embeddings, prompt_is_token_ids=is_token)
    assert step.identity.items == (
        embeds_item(embeddings[:1], 0),
        embeds_item(embeddings[3:6], 3),
        embeds_item(embeddings[9:], 9),
    )


def test_an_adapter_that_is_not_sure_any_more_ends_its_requests(
    tracker: ScheduleTracker,
) -> None:
    """A request under way, whose adapter's id comes with another adapter, may have other weights from now on."""
    started(tracker, lora_request=_adapter("one"))
    tracker.request_allocated(Request("b", [5, 6, 7], lora_request=_adapter("two")))
    tracker.request_allocated(Request("c", [5, 6, 7]))
    meta = tracker.build(
        output(
            {"a": 1, "b": 3, "c": 3},
            (new("b", 0, [41]), new("c", 0, [51])),
            cached(("a", 6, None)),
        )
    )
    skips = {step.request_id: step.skip for step in meta.requests}
    assert skips == {"a": Loss.CAPTURE_DISABLED, "b": Loss.CAPTURE_DISABLED, "c": None}


def test_equal_names_at_once_end_both(tracker: ScheduleTracker) -> None:
    """Of two adapters with one name in a batch vLLM loads one."""
    started(tracker, lora_request=_adapter("one", "/a", 1))
    tracker.request_allocated(Request("b", [5], lora_request=_adapter("one", "/b", 2)))
    meta = tracker.build(output({"a": 1, "b": 1}, (new("b", 0, [41]),), cached(("a", 6, None))))
    assert {step.skip for step in meta.requests} == {Loss.CAPTURE_DISABLED}


@pytest.mark.parametrize(
    "other", [("one", "/b", 2), ("two", "/b", 1), ("one", "/a", 2)], ids=["name", "id", "place"]
)
def test_adapters_that_clash_in_one_step_are_not_captured_in_it(
    tracker: ScheduleTracker, other: tuple[str, str, int]
) -> None:
    """The first of them too, whose part of the step is made before the second one's."""
    for name, lora in (("a", ("one", "/a", 1)), ("b", other)):
        tracker.request_allocated(Request(name, [5], lora_request=_adapter(*lora)))
    meta = tracker.build(output({"a": 1, "b": 1}, (new("a", 0, [31]), new("b", 0, [41]))))
    assert [step.skip for step in meta.requests] == [Loss.CAPTURE_DISABLED] * 2


def test_c25_one_name_after_another_is_captured(tracker: ScheduleTracker) -> None:
    request, step = started(tracker, lora_request=_adapter("one", "/a", 1))
    assert step.identity.lora == LoraIdentity("one", "/a")
    tracker.request_finished(request)
    tracker.request_allocated(Request("b", [5], lora_request=_adapter("one", "/b", 2)))
    (step,) = tracker.build(output({"b": 1}, (new("b", 0, [41]),))).requests
    assert (step.skip, step.identity.lora) == (None, LoraIdentity("one", "/b"))


@pytest.mark.parametrize("salt", ["", "_default", "@", "/", "..", "\N{GRINNING FACE}", "x" * 4096])
def test_c24_any_salt_goes_as_it_is(tracker: ScheduleTracker, salt: str) -> None:
    assert started(tracker, cache_salt=salt)[1].cache_salt == salt


def test_several_requests_in_one_step(tracker: ScheduleTracker) -> None:
    started(tracker)
    tracker.request_allocated(Request("b", [5, 6, 7]))
    meta = tracker.build(
        output({"a": 4, "b": 2}, (new("b", 0, [41]),), cached(("a", 6, [13])), a=1)
    )
    by_name = {step.request_id: step for step in meta.requests}
    assert by_name["b"] == RequestStep("b", 0, 2, (41,), 2, (5, 6, 7), first=True)
    assert (by_name["a"].block_ids, by_name["a"].settled) == ((12, 13), 9)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_adapter_whose_files_change_under_way_is_not_captured_any_more(
    tracker: ScheduleTracker, tmp_path: Path, resumed: bool
) -> None:
    """vLLM may load them again in any step: `load_inplace` does, and so does a resume after the adapter had to go."""
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    started(tracker, lora_request=_adapter("one", str(tmp_path)))
    (sure,) = tracker.build(output({"a": 1}, old=cached(("a", 6, None)))).requests
    assert sure.skip is None
    weights.write_bytes(b"two, of another size")
    again = cached(("a", 7, [11, 12]), resumed=("a",)) if resumed else cached(("a", 7, None))
    (step,) = tracker.build(output({"a": 1}, old=again)).requests
    assert step.skip is Loss.CAPTURE_DISABLED
