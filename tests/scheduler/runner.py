"""Plays vLLM's model runner: keeps requests' tokens and block tables as the real ones do, and computes with model.py.

Form V1 (`GPUModelRunner._update_states`): a resumed request is a cached one whose block table is replaced. Form V2
(`gpu/model_runner.py`): preempted requests are forgotten, a resumed one comes as new with all its tokens. Sampled
tokens are the runner's own knowledge at once; the scheduler hears of them when the step's output is handed to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.scheduler.model import mix, queries, states

VOCABULARY = 40
PADDING = -1


@dataclass
class _State:
    prompt: int
    tokens: list[int]
    blocks: list[int]
    root: int
    is_new: bool = True  # or resumed: what it is told to have computed is to be checked


@dataclass
class Forward:
    """One forward pass.

    Attributes:
        query: float32 `[rows, layers, heads, head_dim]`, the batch as the attention layers see it.
        slots: int64 `[rows or more]`, cache slots; -1 for padding.
        sampled: new tokens of each request, in the order of the step's requests.
    """

    query: NDArray[np.float32]
    slots: NDArray[np.int64]
    sampled: dict[str, list[int]] = field(default_factory=dict)


class Runner:
    """See the head of this file.

    Args:
        random: decides samples, drafts, the batch's order and its padding.
        root_of: request id -> the model's state before its first token.
        group_index: the cache group whose blocks hold the model's states.
        accept: chance (0 to 1) of a draft to be right.
    """

    def __init__(
        self,
        random: Random,
        root_of: Callable[[str], int],
        *,
        block_size: int,
        num_blocks: int,
        group_index: int,
        accept: float,
        drafts: int,
        asynchronous: bool,
        new_form: bool,
        scattered: bool,
    ) -> None:
        self.random = random
        self.root_of = root_of
        self.block_size = block_size
        self.group_index = group_index
        self.accept = accept
        self.drafts = drafts
        self.asynchronous = asynchronous
        self.new_form = new_form
        self.scattered = scattered
        self.cache: list[int] = [0] * (num_blocks * block_size)
        self.states: dict[str, _State] = {}
        self.batch: set[str] = set()
        self.proposed: dict[str, list[int]] = {}
        self.misled: set[str] = set()
        """Requests that were told that cache blocks hold their past, which nobody has ever computed."""

    def execute(self, output: Any) -> Forward | None:
        """One step; None when there is nothing to compute."""
        self._update(output)
        assert not output.kv_cache_block_copies
        if not output.num_scheduled_tokens:
            return None
        starts = {data.req_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        rows: list[list[tuple[int, int, int]]] = []
        sampled: dict[str, list[int]] = {}
        self.proposed = {}
        # In the scheduler's order: a request may hit blocks that one before it fills in this very step.
        for name, count in output.num_scheduled_tokens.items():
            guesses = output.scheduled_spec_decode_tokens.get(name, [])
            rows.append(self._compute(name, starts[name], count, guesses))
            sampled[name] = self._sample(name, starts[name] + count, guesses)
        query, slots = self._lay_out(rows)
        return Forward(query, slots, sampled)

    # --- requests ---------------------------------------------------------------------------------------------

    def _update(self, output: Any) -> None:
        for name in output.finished_req_ids:
            self.states.pop(name, None)
        if self.new_form:
            for name in output.preempted_req_ids or ():
                self.states.pop(name, None)
        for data in output.scheduled_new_reqs:
            assert data.req_id not in self.states
            prompt = len(data.prompt_token_ids or data.prompt_embeds)
            tokens = (
                data.prefill_token_ids
                if self.new_form
                else data.prompt_token_ids or [0] * len(data.prompt_embeds)
            )
            blocks = list(data.block_ids[self.group_index])
            self.states[data.req_id] = _State(
                prompt, list(tokens), blocks, self.root_of(data.req_id)
            )
        self._update_cached(output.scheduled_cached_reqs)
        self.batch = set(output.num_scheduled_tokens)

    def _update_cached(self, cached: Any) -> None:
        for index, name in enumerate(cached.req_ids):
            state = self.states[name]
            resumed = name in cached.resumed_req_ids
            assert not (resumed and self.new_form)
            if not self.new_form:
                self._align_tokens(state, name, cached, cached.num_output_tokens[index], resumed)
            new_blocks = cached.new_block_ids[index]
            if resumed:
                state.blocks, state.is_new = [], True
            if new_blocks is not None:
                state.blocks += new_blocks[self.group_index]

    def _align_tokens(
        self, state: _State, name: str, cached: Any, outputs: int, resumed: bool
    ) -> None:
        if self.asynchronous and outputs and (resumed or name not in self.batch):
            state.tokens[state.prompt :] = cached.all_token_ids[name][-outputs:]
        elif len(state.tokens) > state.prompt + outputs:
            del state.tokens[state.prompt + outputs :]

    # --- computing --------------------------------------------------------------------------------------------

    def _slot(self, state: _State, position: int) -> int:
        block = state.blocks[position // self.block_size]
        assert block > 0, "block 0 is nobody's"
        return block * self.block_size + position % self.block_size

    def _compute(
        self, name: str, start: int, count: int, guesses: list[int]
    ) -> list[tuple[int, int, int]]:
        """Write [start, start + count) into the cache; (state, position, slot) of each."""
        state = self.states[name]
        fed = [*state.tokens, *guesses]
        assert start + count <= len(fed), "the scheduler asks for tokens that nobody knows"
        current = self.cache[self._slot(state, start - 1)] if start else state.root
        if start and state.is_new and current != states(state.root, fed[:start])[-1]:
            self.misled.add(name)
        state.is_new = False
        rows = []
        for position in range(start, start + count):
            current = mix(current, fed[position])
            slot = self._slot(state, position)
            self.cache[slot] = current
            rows.append((current, position, slot))
        return rows

    def _sample(self, name: str, end: int, guesses: list[int]) -> list[int]:
        state = self.states[name]
        if end < len(state.tokens) + len(guesses):
            return []  # part of a prompt
        sampled: list[int] = []
        for guess in guesses:
            right = guess >= 0 and self.random.random() < self.accept
            token = guess if right else self._other(guess)
            sampled.append(token)
            if not right:
                break
        else:
            sampled.append(self._other(-1))
        state.tokens += sampled
        if self.drafts:
            self.proposed[name] = [
                self._other(-1) for _ in range(self.random.randint(0, self.drafts))
            ]
        return sampled

    def _other(self, token: int) -> int:
        found = self.random.randrange(VOCABULARY)
        return found if found != token else (found + 1) % VOCABULARY

    def _lay_out(
        self, parts: list[list[tuple[int, int, int]]]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The batch: requests in any order, padded at the end."""
        self.random.shuffle(parts)
        rows = [row for part in parts for row in part]
        if self.scattered:
            self.random.shuffle(rows)
        query = queries([row[0] for row in rows], [row[1] for row in rows])
        slots = np.array([row[2] for row in rows], dtype=np.int64)
        pad = self.random.choice([0, 0, 1, 5])
        slots = np.concatenate([slots, np.full(pad, PADDING, dtype=np.int64)])
        if self.random.random() < 0.5:
            query = np.concatenate([query, np.full((pad, *query.shape[1:]), -3, dtype=np.float32)])
        return query, slots
