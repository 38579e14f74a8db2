"""What requests say of their own capture, and what must follow; written from the documentation, not from the code."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from lmcache_qclient.vllm.selection import is_sampled
from tests.scheduler.scenario import Scenario

EVERYTHING = (0, 1 << 40)
NOTHING = (0, 0)


@dataclass(frozen=True)
class Wish:
    """What a request says under `kv_transfer_params["qserver"]`.

    Attributes:
        captured: what it says of whether; None: nothing.
        tokens: what it says of which; empty: nothing.
        senseless: nobody can follow it.
    """

    said: dict[str, Any]
    captured: bool | None = None
    tokens: str = ""
    senseless: bool = False

    @property
    def extra_args(self) -> dict[str, Any]:
        """For `SamplingParams`."""
        return {"kv_transfer_params": {"qserver": self.said}}


WISHES = (
    Wish({}),
    Wish({"capture": True}, captured=True),
    Wish({"capture": False}, captured=False),
    Wish({"capture": False, "tokens": "all"}, captured=False, tokens="all"),
    Wish({"capture": True, "tokens": "decode"}, captured=True, tokens="decode"),
    Wish({"tokens": "prompt"}, tokens="prompt"),
    Wish({"tokens": "all", "layers": "0,-1"}, tokens="all"),
    Wish({"capture": True, "layers": [0]}, senseless=True),
    Wish({"capture": True, "layer": "all"}, senseless=True),
    Wish({"capture": True, "tokens": "none"}, senseless=True),
)


def draw_wish(random: Random, scenario: Scenario) -> Wish | None:
    """What the next request says, if it says anything."""
    return random.choice(WISHES) if random.random() < scenario.asks else None


def selected(scenario: Scenario, wish: Wish | None, name: str, prompt: int) -> tuple[int, int]:
    """Positions [from, to) that are to be captured of a request with `prompt` tokens."""
    wish = wish or Wish({})
    captured = is_sampled(name, scenario.sample) if wish.captured is None else wish.captured
    if wish.senseless or not captured:
        return NOTHING
    return {"all": EVERYTHING, "prompt": (0, prompt), "decode": (prompt, EVERYTHING[1])}[
        wish.tokens or scenario.tokens
    ]
