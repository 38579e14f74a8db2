"""The switches in vLLM's `kv_connector_extra_config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmcache_qclient.capture.layer_selection import LayerSelection, parse_layers
from lmcache_qclient.capture.ring_size import DEFAULT_RING_BYTES, RingSettings
from lmcache_qclient.features.query import FEATURE as QUERY
from lmcache_qclient.features.registry import FEATURE_REGISTRY
from lmcache_qclient.link.connection import AUTO, TRANSPORTS
from lmcache_qclient.vllm.selection import check_tokens

TRANSFER = "lmcache.mp.transfer_intermediate_tensors"
PREFIX = "lmcache.q."
UNTESTED_GPU = "lmcache.q.allow_untested_gpu"

KNOWN: dict[str, str] = {
    "lmcache.q.server_url": "the server's ZeroMQ address (tcp://127.0.0.1:5555)",
    "lmcache.q.ring_blocks": "blocks of the ring; computed when absent",
    "lmcache.q.ring_depth": "steps of max_num_batched_tokens that the ring holds (2)",
    "lmcache.q.ring_bytes": f"most bytes of a computed ring ({DEFAULT_RING_BYTES})",
    "lmcache.q.on_full": "when the ring is full: drop rows (counted as ring_full), or wait for stores (drop)",
    "lmcache.q.full_wait_s": "with on_full=wait: most seconds that one step waits (0.1)",
    "lmcache.q.tails": "store chunks that were not computed whole, as pieces (true)",
    "lmcache.q.transport": "how bytes go: shm, inline, or auto: shm where the server's Unix socket is reachable (auto)",
    "lmcache.q.layers": 'layers to capture: "0,5,-1", a range "4-7", a slice "::2" (all)',
    "lmcache.q.tokens": "which tokens to capture: prompt, decode or all (all)",
    "lmcache.q.sample": "share of the requests to capture, 0 to 1, by a hash of the request id (1)",
    "lmcache.q.allow_untested_gpu": "capture on a CUDA device, which has never been tried on a card (false)",
    "lmcache.q.connect_timeout_s": "seconds to wait for the server at start (10)",
    "lmcache.q.heartbeat_s": "seconds between two pings (10)",
}
"""Every `lmcache.q.*` key and what it says; the documentation's table comes from here."""


@dataclass(frozen=True)
class Settings:
    """Parsed switches.

    Attributes:
        features: requested features; empty when capture is off.
        server_url: ZeroMQ address.
        ring: size of the ring, which layers, and whether pieces are stored.
        tokens, sample: see `Selection`.
        connect_timeout_s, heartbeat_s: seconds.
        transport: one of `TRANSPORTS`.
    """

    features: tuple[str, ...] = ()
    server_url: str = "tcp://127.0.0.1:5555"
    ring: RingSettings = field(default_factory=RingSettings)
    connect_timeout_s: float = 10.0
    heartbeat_s: float = 10.0
    tokens: str = "all"
    sample: float = 1.0
    transport: str = AUTO


def parse_settings(extra: Mapping[str, Any]) -> Settings:
    """Read the switches.

    Raises:
        ValueError: an unknown `lmcache.q.*` key, or a value of the wrong kind.
    """
    unknown = sorted(key for key in extra if key.startswith(PREFIX) and key not in KNOWN)
    if unknown:
        raise ValueError(f"unknown switch {', '.join(unknown)}; known: {', '.join(KNOWN)}")
    blocks = extra.get("lmcache.q.ring_blocks")
    defaults = Settings()
    return Settings(
        features=_features(extra.get(TRANSFER, False)),
        server_url=str(extra.get("lmcache.q.server_url", defaults.server_url)),
        ring=RingSettings(
            blocks=None if blocks is None else max(1, _integer("lmcache.q.ring_blocks", blocks)),
            depth=max(1, _integer("lmcache.q.ring_depth", extra.get("lmcache.q.ring_depth", 2))),
            max_bytes=_integer(
                "lmcache.q.ring_bytes", extra.get("lmcache.q.ring_bytes", DEFAULT_RING_BYTES)
            ),
            tails=_flag("lmcache.q.tails", extra.get("lmcache.q.tails", True)),
            wait_s=_full_wait_s(extra),
            layers=_layers(extra.get("lmcache.q.layers")),
            allow_untested_gpu=_flag(UNTESTED_GPU, extra.get(UNTESTED_GPU, False)),
        ),
        tokens=check_tokens("lmcache.q.tokens", extra.get("lmcache.q.tokens", defaults.tokens)),
        sample=_share("lmcache.q.sample", extra.get("lmcache.q.sample", defaults.sample)),
        connect_timeout_s=_seconds(
            extra, "lmcache.q.connect_timeout_s", defaults.connect_timeout_s
        ),
        heartbeat_s=_seconds(extra, "lmcache.q.heartbeat_s", defaults.heartbeat_s),
        transport=_transport(extra.get("lmcache.q.transport", defaults.transport)),
    )


def _features(value: Any) -> tuple[str, ...]:
    """true: queries; else names of features, as a list or between commas."""
    if isinstance(value, bool) or (isinstance(value, str) and value.lower() in ("true", "false")):
        return (QUERY.name,) if _flag(TRANSFER, value) else ()
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, list | tuple) and names:
        wanted = tuple(dict.fromkeys(str(name).strip() for name in names))
        if all(name in FEATURE_REGISTRY for name in wanted):
            return wanted
    known = ", ".join(FEATURE_REGISTRY)
    raise ValueError(f"{TRANSFER} is true or false, or a list of features ({known}), not {value!r}")


def _layers(value: Any) -> LayerSelection | None:
    if value is None or value == "all":
        return None
    try:
        return parse_layers(value)
    except ValueError as error:
        raise ValueError(f"lmcache.q.layers: {error}") from None


def _share(key: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if isinstance(value, bool) or not 0 <= share <= 1:
        raise ValueError(f"{key} is a share between 0 and 1, not {value!r}")
    return share


def _full_wait_s(extra: Mapping[str, Any]) -> float:
    on_full = extra.get("lmcache.q.on_full", "drop")
    if on_full not in ("drop", "wait"):
        raise ValueError(f"lmcache.q.on_full is drop or wait, not {on_full!r}")
    wait_s = _seconds(extra, "lmcache.q.full_wait_s", 0.1)
    return wait_s if on_full == "wait" else 0.0


def _transport(value: Any) -> str:
    if value not in TRANSPORTS:
        raise ValueError(f"lmcache.q.transport is one of {', '.join(TRANSPORTS)}, not {value!r}")
    return str(value)


def _flag(key: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(f"{key} is true or false, not {value!r}")


def _integer(key: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise ValueError
        return int(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{key} is a whole number, not {value!r}") from None


def _seconds(extra: Mapping[str, Any], key: str, default: float) -> float:
    value = extra.get(key, default)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{key} is a number of seconds, not {value!r}") from None
    if not 0 < seconds < math.inf:
        raise ValueError(f"{key} must be positive and finite, not {value!r}")
    return seconds
