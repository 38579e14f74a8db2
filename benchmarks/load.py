"""What an engine is given in one batch, and how large a batch must be to take a useful time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

FIRST_TOKEN, LAST_TOKEN = 1000, 40000
"""Ids that are plain words in SmolLM2's vocabulary."""
BATCH_S = 1.5
"""Long enough that a timer's tick does not show, short enough that a drift of the machine hits both of a pair."""
MIN_TOKENS, MAX_NEW_TOKENS, MAX_PROMPTS = 32, 256, 8


@dataclass(frozen=True)
class Load:
    """One batch.

    Attributes:
        prompts: how many, all at once.
        prompt_tokens: of each; no two prompts begin alike.
        new_tokens: sampled for each; the end-of-text token does not end it.
    """

    prompts: int
    prompt_tokens: int
    new_tokens: int

    def __str__(self) -> str:
        return f"{self.prompts} x ({self.prompt_tokens} + {self.new_tokens})"

    @property
    def computed(self) -> int:
        """Tokens that go through the model: the last sampled one never does."""
        return self.prompts * (self.prompt_tokens + self.new_tokens - 1)

    def token_ids(self, seed: int) -> list[list[int]]:
        """The prompts."""
        chance = random.Random(seed)
        return [
            [chance.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(self.prompt_tokens)]
            for _ in range(self.prompts)
        ]

    def message(self, seed: int, stock: bool) -> dict[str, Any]:
        """For `benchmarks.engine`; `stock`: without capture."""
        return {"seed": seed, "stock": stock, **asdict(self)}


PREFILL = Load(prompts=2, prompt_tokens=512, new_tokens=1)
DECODE = Load(prompts=4, prompt_tokens=32, new_tokens=64)
MIXED = Load(prompts=2, prompt_tokens=300, new_tokens=16)


def fitted(load: Load, seconds: Callable[[Load], float]) -> Load:
    """The load made larger or smaller so that a batch takes about BATCH_S.

    Args:
        load: in the proportions that are to be kept.
        seconds: runs a batch, warm.
    """
    factor = BATCH_S / seconds(load)
    if load.new_tokens > load.prompt_tokens:
        return replace(
            load, new_tokens=_between(MIN_TOKENS, load.new_tokens * factor, MAX_NEW_TOKENS)
        )
    prompts = _between(1, load.prompts * factor, MAX_PROMPTS)
    shorter = min(1.0, load.prompts * factor / prompts)  # one prompt may be too long already
    return replace(
        load,
        prompts=prompts,
        prompt_tokens=_between(MIN_TOKENS, load.prompt_tokens * shorter, load.prompt_tokens),
    )


def _between(least: int, value: float, most: int) -> int:
    return max(least, min(most, round(value)))
