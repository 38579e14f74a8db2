"""One engine with capture and without, by turns: what capture costs, and nothing else.

Two engines side by side differ by 2 or 3 % without any capture, for as long as they live: their weights lie on other
pages. One engine has no such luck. So capture is taken out of it and put back: `stock` leaves it as an engine that was
built without a KV connector. Only for an engine inside this process, between two batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer import kv_transfer_state


class Capture:
    """The capture of one `LLM`.

    Args:
        llm: inside this process, built with our connector.
    """

    def __init__(self, llm: Any) -> None:
        self._core = llm.llm_engine.engine_core.engine_core
        self._worker = kv_transfer_state.get_kv_transfer_group()
        layers = self._worker._config.compilation_config.static_forward_context.values()
        impls = [layer.impl for layer in layers if hasattr(layer, "impl")]
        self._wrapped = {impl: vars(impl)["forward"] for impl in impls if "forward" in vars(impl)}
        if not self._wrapped:
            raise RuntimeError("no layer is wrapped: there is no capture to take out")

    @contextlib.contextmanager
    def stock(self) -> Iterator[None]:
        """Inside, the engine has no connector, in both its roles, and no layer is wrapped."""
        scheduler, core = self._core.scheduler, self._core
        connector, hasher = scheduler.connector, core.request_block_hasher
        for impl in self._wrapped:
            del impl.forward  # the instance's; the class's is vLLM's own
        scheduler.connector = None
        core.request_block_hasher = None  # without prefix caching it is there for connectors only
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = self._worker
            scheduler.connector, core.request_block_hasher = connector, hasher
            for impl, forward in self._wrapped.items():
                impl.forward = forward

    def end_batch(self) -> None:
        """What the next step, or the worker's thread half a second later, would do for the requests that have ended.

        So that it falls into the time of the batch that caused it.
        """
        self._worker._work_idle()
