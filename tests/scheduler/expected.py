"""What must have become of a request's tokens, told from its steps alone; written from the rules, not from the ledger.

A row can be stored if it was really computed, with the token that stands at its position in the end, and if that is
*known*: all positions are known but a last token that a draft's row may stand for. With pieces all such rows are
stored, once; without, those of whole chunks whose first position was computed. Of all this only what is selected;
the rest is counted as that each time when it is computed, whatever else becomes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lmcache_qprotocol.reasons import LossReason as Loss
from tests.scheduler.scenario import Scenario
from tests.scheduler.wishes import EVERYTHING

CAPTURED = "captured"


@dataclass(frozen=True)
class Ran:
    """One request's part of one step: positions [start, start + count), the last `drafts` of them guessed."""

    start: int
    count: int
    drafts: int
    resumed: bool

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.count

    @property
    def sure_end(self) -> int:
        """One past the last position that was no guess."""
        return self.end - self.drafts


@dataclass
class Life:
    """One request and its steps.

    Attributes:
        request: vLLM's own.
        root: the model's state before its first token.
        nameable: its token ids stand for its tensors.
        selected: positions [from, to) that are to be captured.
        steps: what was computed of it, in order.
    """

    request: Any
    root: int
    nameable: bool = True
    selected: tuple[int, int] = EVERYTHING
    steps: list[Ran] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return list(self.request.all_token_ids)

    @property
    def computed(self) -> int:
        """Tokens computed for it, repeated ones counted again."""
        return sum(step.count for step in self.steps)

    @property
    def not_selected(self) -> int:
        """Tokens computed for it that are not selected, repeated ones counted again."""
        return self.computed - sum(self.of_selected(step.start, step.end) for step in self.steps)

    def of_selected(self, start: int, end: int) -> int:
        """How many of the positions [start, end) are selected."""
        return max(0, min(end, self.selected[1]) - max(start, self.selected[0]))

    @property
    def was_preempted(self) -> bool:
        """Ever."""
        return bool(self.request.num_preemptions)

    @property
    def last_run(self) -> list[Ran]:
        """Its steps since it was last resumed."""
        begins = [index for index, step in enumerate(self.steps) if step.resumed]
        return self.steps[begins[-1] if begins else 0 :]

    def reliable_end(self, steps: Sequence[Ran]) -> int:
        """One past the last position that `steps` have computed, and of which the token is known to be right."""
        length = len(self.tokens)
        known = max([length - 1, *(step.sure_end for step in steps)])
        return min(length, steps[-1].end, known)


def foretold(scenario: Scenario, lives: Sequence[Life]) -> bool:
    """Whether the fate of every token follows from `lives` alone.

    After a preemption it depends on what had been accepted, and without pieces on how chunks were cut.
    """
    preempted = any(life.was_preempted for life in lives)
    return scenario.roomy and (not preempted or (scenario.pieces and not scenario.drafts))


def spans(scenario: Scenario, life: Life, steps: Sequence[Ran]) -> list[tuple[int, int]]:
    """[from, to) of what must be stored of a request of which `steps` are known, at most one a chunk.

    Those are all objects if it was never preempted.
    """
    if not steps or not life.nameable:
        return []
    size = scenario.chunk_size
    first = max(steps[0].start, life.selected[0])
    end = min(life.reliable_end(steps), life.selected[1])
    if not scenario.pieces:
        first, end = -(-first // size) * size, end // size * size
    edges = [first, *range((first // size + 1) * size, end, size), end]
    return list(pairwise(edges)) if first < end else []


def positions(life: Life) -> set[int]:
    """With pieces and without drafts: whatever is selected, was computed, and belongs to the request in the end."""
    if not life.nameable:
        return set()
    computed = {at for step in life.steps for at in range(step.start, step.end)}
    return {at for at in computed if at < len(life.tokens) and life.of_selected(at, at + 1)}


def fates(scenario: Scenario, life: Life) -> Counter[str]:
    """Tokens of one request by outcome, where that is `foretold`."""
    steps, found = life.steps, Counter[str]()
    if not steps:
        return found
    if not life.nameable:
        return Counter({Loss.CAPTURE_DISABLED.value: life.computed})
    length, end = len(life.tokens), steps[-1].end
    found[Loss.NOT_SELECTED.value] = life.not_selected
    if life.was_preempted:
        end = max(step.end for step in steps)
        found[CAPTURED] = len(positions(life))
        found[Loss.DISCARDED_AFTER_FINISH.value] = life.of_selected(length, end)
        found[Loss.RECOMPUTED.value] = life.computed - found.total()
        return found
    found[CAPTURED] = sum(to - at for at, to in spans(scenario, life, steps))
    first = max(steps[0].start, life.selected[0])
    if not scenario.pieces:  # rows before the first whole chunk are lost at once
        first = -(-first // scenario.chunk_size) * scenario.chunk_size
    for step, after in pairwise(steps):
        found[Loss.REJECTED_DRAFT.value] += life.of_selected(max(after.start, first), step.end)
    found[Loss.DISCARDED_AFTER_FINISH.value] = life.of_selected(max(length, first), end)
    rest = Loss.REJECTED_DRAFT if scenario.pieces else Loss.TAIL_OFF
    found[rest.value] += life.computed - found.total()
    return found


def most(scenario: Scenario, lives: Sequence[Life]) -> Counter[str]:
    """For every outcome the most tokens that can have come to it; 0 for those that the scenario does not allow."""
    computed = sum(life.computed for life in lives)
    found: Counter[str] = Counter({CAPTURED: computed})
    for life in lives:
        found += _most(scenario, life)
    if scenario.ring_blocks < scenario.AMPLE:
        found[Loss.RING_FULL.value] = computed
    if scenario.outage:
        found[Loss.SERVER_UNAVAILABLE.value] = computed
    if scenario.refuse:
        found[Loss.POOL_FULL.value] = computed
    if scenario.faults:
        for reason in (
            Loss.UNMATCHED,
            Loss.LAYER_MISSING,
            Loss.CAPTURE_DISABLED,
            Loss.TAIL_OFF,
        ):
            found[reason.value] = computed
    return found


def _most(scenario: Scenario, life: Life) -> Counter[str]:
    found: Counter[str] = Counter()
    if not life.steps:
        return found
    if not life.nameable:
        found[Loss.CAPTURE_DISABLED.value] = life.computed
    found[Loss.NOT_SELECTED.value] = life.not_selected
    if life.not_selected == life.computed:
        return found
    reached = 0
    for step in life.steps:
        if life.was_preempted:
            found[Loss.RECOMPUTED.value] += max(0, min(reached, step.end) - step.start)
        past_end = step.end - max(step.start, len(life.tokens))
        found[Loss.DISCARDED_AFTER_FINISH.value] += max(0, past_end)
        reached = max(reached, step.end)
    for step, after in pairwise(life.steps):
        if after.resumed:
            found[Loss.PREEMPTED.value] += step.drafts
        else:
            found[Loss.REJECTED_DRAFT.value] += max(0, step.end - after.start)
    last = min(life.steps[-1].end, len(life.tokens)) - life.reliable_end(life.steps)
    found[Loss.REJECTED_DRAFT.value] += max(0, last)
    if not scenario.pieces:
        found[Loss.TAIL_OFF.value] = life.computed
        found[Loss.PREEMPTED.value] = life.computed if life.was_preempted else 0
    return found
