"""Writes docs/metrics.md's table, from the metrics of a server that has just started.

python docs/generate_metrics.py            rewrite it in place
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from lmcache_qserver.events import EventBus
from lmcache_qserver.face.metrics import server_registry
from lmcache_qserver.face.status import ServerState
from lmcache_qserver.pool import Pool, PoolMemory
from lmcache_qserver.qstore import QStoreModule
from lmcache_qserver.wire.clients import Clients
from lmcache_qserver.wire.counts import WireCounts

PAGE = Path(__file__).parent / "metrics.md"
PART = re.compile(r"(<!-- generated: metrics -->\n).*?(<!-- end -->)", re.DOTALL)
LISTED = 8
"""Values of a label that are listed; there are closed sets in PROTOCOL.md for those with more."""


def families() -> list[Metric]:
    """All of /metrics, of a server that has just started."""
    with PoolMemory(1 << 20) as memory:
        pool, bus = Pool(memory), EventBus()
        state = ServerState(
            boot_id=bytes(16),
            chunk_size=256,
            features=(),
            module=QStoreModule(pool=pool, bus=bus, chunk_size=256),
            pool=pool,
            clients=Clients(lambda session: None),
            clock=time.monotonic,
            started=time.monotonic(),
        )
        registry, _ = server_registry(bus, state, WireCounts(), lambda: 0)
        return list(registry.collect())


def exposed_name(family: Metric) -> str:
    """The name that queries use."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def labels(family: Metric) -> dict[str, list[str]]:
    """Names of labels and their values, in order of appearance; buckets apart."""
    found: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for name, value in sample.labels.items():
            if name != "le":
                found.setdefault(name, {})[value] = None
    return {name: list(values) for name, values in found.items()}


def _in_words(family: Metric) -> str:
    words = []
    for name, values in labels(family).items():
        listed = ", ".join(values) if len(values) <= LISTED and name != "version" else ""
        words.append(f"`{name}`" + (f": {listed}" if listed else ""))
    return "; ".join(words)


def rows() -> Iterator[str]:
    """Lines of the table."""
    for family in families():
        text = family.documentation
        yield f"| `{exposed_name(family)}` | {family.type} | {_in_words(family)} | {text} |"


def updated(text: str) -> str:
    """The page with a fresh table."""
    head = "| name | type | labels | meaning |\n| --- | --- | --- | --- |\n"
    return PART.sub(lambda match: match[1] + head + "\n".join(rows()) + "\n" + match[2], text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
