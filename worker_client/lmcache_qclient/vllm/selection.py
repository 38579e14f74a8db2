"""Which requests and tokens are captured: by the engine's switches, and by what a request says of itself.

    "lmcache.q.tokens": "prompt"                      the engine, for all requests
    kv_transfer_params={"qserver": {"capture": true,  one request; over HTTP a field of the body, in Python
                                    "tokens": "all"}} SamplingParams(extra_args={"kv_transfer_params": ...})

A connector can't refuse a request: what it raises ends the engine. So a request that says what nobody understands is
computed, is not captured at all (`not_selected`), and the log says why, at most once in `LOG_EVERY_S`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from lmcache_qclient.capture.layer_selection import LayerSelection, parse_layers
from lmcache_qprotocol.limits import MAX_POSITION

logger = logging.getLogger(__name__)

FIELD = "qserver"
TOKENS = ("all", "prompt", "decode")
KNOWN = {
    "capture": "true or false: capture this request, or not, whatever lmcache.q.sample says",
    "tokens": "prompt, decode or all, in place of lmcache.q.tokens",
    "layers": "must be the layers that the engine captures: a request can't choose others",
}
"""Keys of a request's `kv_transfer_params["qserver"]`."""
LOG_EVERY_S = 10.0
LOG_CHARS = 1000
"""Of what a request says, in the log."""

_ENGINES_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
"""What vLLM adds to the id that the client gave, anew for each request."""


@dataclass(frozen=True)
class Choice:
    """What is captured of one request.

    Attributes:
        captured: False: nothing.
        positions: absolute [from, to); None: all.
    """

    captured: bool
    positions: tuple[int, int] | None = None


NOTHING = Choice(False)


class Selection:
    """The engine's switches, applied to requests.

    Args:
        tokens: one of `TOKENS`.
        sample: share of the requests, in [0, 1].
        layers: that the engine captures; None for all.
        num_layers: of the model.
        clock: seconds, monotonic; for the log's patience.
    """

    def __init__(
        self,
        tokens: str = "all",
        sample: float = 1.0,
        layers: LayerSelection | None = None,
        num_layers: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._sample = sample
        self._layers = layers
        self._num_layers = num_layers
        self._clock = clock
        self._log_again_at = 0.0
        self._unlogged = 0

    def of(self, request: Any) -> Choice:
        """What is captured of a vLLM `Request`."""
        params = getattr(request, "kv_transfer_params", None)
        asked = params.get(FIELD) if isinstance(params, Mapping) else None
        try:
            capture, tokens = (None, self._tokens) if asked is None else self._asked(asked)
        except ValueError as error:
            self._log(request.request_id, error)
            return NOTHING
        if capture is None:
            capture = is_sampled(request.request_id, self._sample)
        return Choice(True, _positions(tokens, request)) if capture else NOTHING

    def _asked(self, asked: Any) -> tuple[bool | None, str]:
        """(capture, tokens) of a request's own words.

        Raises:
            ValueError: they can't be followed.
        """
        if not isinstance(asked, Mapping):
            raise ValueError(f"it is a map, not {asked!r}; known keys: {', '.join(KNOWN)}")
        unknown = [str(key) for key in asked if key not in KNOWN]
        if unknown:
            raise ValueError(f"unknown key {', '.join(unknown)}; known: {', '.join(KNOWN)}")
        capture = asked.get("capture")
        if not isinstance(capture, bool | None):
            raise ValueError(f"capture is true or false, not {capture!r}")
        if "layers" in asked:
            self._check_layers(asked["layers"])
        return capture, check_tokens("tokens", asked.get("tokens", self._tokens))

    def _check_layers(self, value: Any) -> None:
        captured = range(self._num_layers)
        own = frozenset(captured) if self._layers is None else self._layers.of(self._num_layers)
        if parse_layers(value).of(self._num_layers) != own:
            raise ValueError(
                f"layers {value!r} are not those that this engine captures ({self._layers or 'all'}): its ring and its "
                "objects hold these together. Start it with other lmcache.q.layers, or pass layers= when reading"
            )

    def _log(self, request_id: str, error: ValueError) -> None:
        now = self._clock()
        if now < self._log_again_at:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last such message)" if self._unlogged else ""
        logger.warning(
            "request %s is not captured, its kv_transfer_params[%r] can't be followed: %s%s",
            request_id,
            FIELD,
            str(error)[:LOG_CHARS],
            more,
        )
        self._log_again_at, self._unlogged = now + LOG_EVERY_S, 0


def is_sampled(request_id: str, share: float) -> bool:
    """Whether a request belongs to the share: by a hash of the id that its client gave, the same everywhere."""
    name = _ENGINES_SUFFIX.sub("", request_id)
    place = int.from_bytes(blake3(name.encode()).digest(8), "big") / (1 << 64)
    return place < share


def check_tokens(key: str, value: Any) -> str:
    """The value of a `tokens` switch.

    Raises:
        ValueError: it is none of `TOKENS`.
    """
    if value not in TOKENS:
        raise ValueError(f"{key} is {', '.join(TOKENS)}, not {value!r}")
    return str(value)


def _positions(tokens: str, request: Any) -> tuple[int, int] | None:
    if tokens == "all":
        return None
    prompt = int(request.num_prompt_tokens)
    return (0, prompt) if tokens == "prompt" else (prompt, MAX_POSITION + 1)
