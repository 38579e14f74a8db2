"""Which requests and tokens are captured: the engine's switches, and what a request says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lmcache_qclient.capture.layer_selection import parse_layers
from lmcache_qclient.vllm.schedule import ScheduleTracker
from lmcache_qclient.vllm.selection import LOG_EVERY_S, NOTHING, Choice, Selection, is_sampled
from lmcache_qprotocol.limits import MAX_POSITION
from lmcache_qprotocol.reasons import LossReason as Loss
from tests.worker_client.vllm.test_schedule import Request, cached, new, output

ALL = Choice(True)
END = MAX_POSITION + 1


@dataclass
class Asking:
    """A vLLM `Request` of 7 prompt tokens, as far as it is read."""

    kv_transfer_params: Any = None
    request_id: str = "r"
    num_prompt_tokens: int = 7


def says(**words: Any) -> Asking:
    return Asking({"qserver": words})


@pytest.mark.parametrize(
    "params", [None, {}, {"other": 1}, {"qserver": None}, "odd", {"qserver": {}}]
)
def test_who_says_nothing_gets_what_the_engine_does(params: Any) -> None:
    assert Selection().of(Asking(params)) == ALL
    assert Selection(tokens="prompt").of(Asking(params)) == Choice(True, (0, 7))
    assert Selection(tokens="decode").of(Asking(params)) == Choice(True, (7, END))
    assert Selection(sample=0).of(Asking(params)) == NOTHING


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        ({"capture": True}, Choice(True, (0, 7))),
        ({"capture": False}, NOTHING),
        ({"capture": True, "tokens": "all"}, ALL),
        ({"capture": True, "tokens": "decode"}, Choice(True, (7, END))),
        ({"capture": True, "layers": [1, -1]}, Choice(True, (0, 7))),
        ({"capture": True, "layers": "1,9"}, Choice(True, (0, 7))),
        ({"capture": False, "layers": "9,1"}, NOTHING),
        ({"tokens": "all"}, NOTHING),  # the share decides, and it is 0
    ],
)
def test_a_request_may_say_otherwise(words: dict[str, Any], choice: Choice) -> None:
    selection = Selection("prompt", 0, parse_layers("1,9"), 10)
    assert selection.of(says(**words)) == choice


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"capture": True, "layer": [1]}, "unknown key layer; known: capture, tokens, layers"),
        ({"captures": True, 3: 4}, "unknown key captures, 3; known"),
        ({"capture": 1}, "capture is true or false, not 1"),
        ({"capture": "yes"}, "capture is true or false"),
        ({"tokens": "prompts"}, "tokens is all, prompt, decode, not 'prompts'"),
        ({"tokens": ["all"]}, "tokens is all, prompt, decode"),
        ({"layers": [1]}, "are not those that this engine captures (1,9)"),
        ({"layers": "0-9"}, "are not those that this engine captures"),
        ({"layers": [99]}, "the model has layers 0 to 9"),
        ({"layers": {}}, "layers are written as"),
    ],
)
def test_what_can_not_be_followed_is_not_captured_and_told(
    words: dict[Any, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    selection = Selection(layers=parse_layers("1,9"), num_layers=10)
    assert selection.of(Asking({"qserver": words})) == NOTHING
    assert said in caplog.text
    assert "request r is not captured" in caplog.text


@pytest.mark.parametrize("words", [True, "prompt", [1]])
def test_words_that_are_no_map(words: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert Selection().of(Asking({"qserver": words})) == NOTHING
    assert "known keys: capture, tokens, layers" in caplog.text


def test_an_engine_of_all_layers_takes_all_layers_for_its_own() -> None:
    assert Selection(num_layers=3).of(says(layers="0-2")) == ALL
    assert Selection(num_layers=3).of(says(layers=[0])) == NOTHING


def test_a_long_word_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    assert Selection().of(says(tokens="x" * 100_000)) == NOTHING
    assert len(caplog.text) < 2000


def test_the_log_is_patient(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    selection = Selection(clock=lambda: now[0])
    for _ in range(5):
        selection.of(says(odd=1))
    assert len(caplog.records) == 1
    now[0] += LOG_EVERY_S
    selection.of(says(odd=1))
    assert "4 more since" in caplog.records[1].getMessage()


def test_the_share_is_of_all_requests_and_the_same_for_one_id() -> None:
    ids = [f"cmpl-{number}" for number in range(4000)]
    for share in (0.0, 0.25, 1.0):
        kept = [name for name in ids if is_sampled(name, share)]
        assert abs(len(kept) / 4000 - share) < 0.03
        assert all(is_sampled(name, min(1.0, share + 0.1)) for name in kept), (
            "a larger share keeps it"
        )
    # Golden: the same in every version.
    assert [is_sampled(name, 0.5) for name in ("0", "1", "2", "3")] == [True, False, False, True]


def test_what_the_engine_adds_to_an_id_does_not_count() -> None:
    for number in range(50):
        name = f"user-{number}"
        assert is_sampled(name, 0.5) == is_sampled(f"{name}-{number:08x}", 0.5)


# --- through the tracker --------------------------------------------------------------------------


def test_the_tracker_tells_the_positions_once() -> None:
    tracker = ScheduleTracker(1, 4, Selection("prompt"))
    request = Request("a", list(range(10)))
    request.num_prompt_tokens = 9  # type: ignore[attr-defined]  # of vLLM's
    tracker.request_allocated(request)
    (step,) = tracker.build(output({"a": 6}, (new("a", 0, [11, 12]),))).requests
    assert (step.selected, step.skip) == ((0, 9), None)
    (step,) = tracker.build(output({"a": 4}, old=cached(("a", 6, [13])))).requests
    assert (step.selected, step.skip) == (None, None)


def test_a_request_that_is_kept_out_is_not_selected() -> None:
    tracker = ScheduleTracker(1, 4, Selection(sample=0))
    tracker.request_allocated(Request("a", list(range(10))))
    (step,) = tracker.build(output({"a": 6}, (new("a", 0, [11, 12]),))).requests
    assert step.skip is Loss.NOT_SELECTED


def test_what_can_not_be_captured_keeps_its_own_reason() -> None:
    tracker = ScheduleTracker(1, 4, Selection(sample=0))
    tracker.request_allocated(Request("a", list(range(10)), resumable=True))
    (step,) = tracker.build(output({"a": 6}, (new("a", 0, [11, 12]),))).requests
    assert step.skip is Loss.CAPTURE_DISABLED
