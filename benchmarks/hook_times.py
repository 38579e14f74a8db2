"""Where our time goes in the engine's process: CPU seconds of each of the connector's hooks, in both its roles.

`later layers` run inside the forward pass, between any two layers; the others run once a step. CPU time, because what
the machine does for others meanwhile would drown these microseconds; the clock's own call, about 0.5 us, is in them.
What our threads take (link, heartbeat) is not: compare `cpu_seconds`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from lmcache_qclient.capture.tensor_kind import LayerSink
from lmcache_qclient.features.dispatcher import Dispatcher

HOOKS = (
    "_on_first_layer",
    "bind_connector_metadata",
    "wait_for_save",
    "get_finished",
    "build_connector_meta",
    "update_state_after_alloc",
    "request_finished",
    "get_num_new_matched_tokens",
)


def time_hooks() -> dict[str, list[float]]:
    """Wrap the hooks; call before the engine is built.

    Returns:
        By hook, [calls, seconds]; clear it to start over.
    """
    from lmcache_qclient.vllm.connector import QServerConnector

    times: dict[str, list[float]] = {}
    for name in HOOKS:
        setattr(QServerConnector, name, _timed(getattr(QServerConnector, name), name, times))
    layer_sink = Dispatcher.layer_sink

    def timed_sink(dispatcher: Dispatcher) -> LayerSink | None:
        sink = layer_sink(dispatcher)
        return None if sink is None else _timed(sink, "later layers", times)

    setattr(Dispatcher, "layer_sink", timed_sink)  # noqa: B010 - mypy lets nobody assign to it
    return times


def _timed(
    call: Callable[..., Any], name: str, times: dict[str, list[float]]
) -> Callable[..., Any]:
    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            total = times.setdefault(name, [0, 0.0])
            total[0] += 1
            total[1] += time.thread_time() - began

    return timed
