"""QServerConnector: what vLLM loads. It translates vLLM's hooks into the dispatcher's, and holds no logic of its own.

Two instances exist: one beside the scheduler, which tells each step's requests; one in every worker, which captures. It
never loads or holds KV: vLLM runs as it would without it.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.forward_context import get_forward_context

from lmcache_qclient.capture.account import Account
from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.geometry import reference_group
from lmcache_qclient.capture.step import StepMeta
from lmcache_qclient.capture.tensor_kind import Tensors
from lmcache_qclient.features.dispatcher import Dispatcher, init_dispatcher
from lmcache_qclient.features.idle_watch import IdleWatch
from lmcache_qclient.link.connection import Connection
from lmcache_qclient.vllm.engine_names import instance_id
from lmcache_qclient.vllm.guard import ScheduleGuard
from lmcache_qclient.vllm.hook import Tap, wrap_layers
from lmcache_qclient.vllm.neighbours import announce, neighbour
from lmcache_qclient.vllm.refusals import refuse_unsupported
from lmcache_qclient.vllm.schedule import ScheduleTracker
from lmcache_qclient.vllm.selection import Selection
from lmcache_qclient.vllm.settings import parse_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

EVENT_NONE_PENDING = b""
"""On a CPU the forward pass is over when it returns."""
ENDED_AT_ONCE = 8
"""Requests that are ended in one portion of work between steps; a step that comes meanwhile waits for it."""


@dataclass
class QServerMetadata(KVConnectorMetadata):
    """One step, from the scheduler's instance to the workers'."""

    step: StepMeta


class QServerConnector(KVConnectorBase_V1, SupportsHMA):
    """Captures tensors of attention into lmcache-qserver; switched on by `lmcache.mp.transfer_intermediate_tensors`."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _join_engine_log()
        self.settings = parse_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._config = vllm_config
        self._cache_config = kv_cache_config
        self._tracker: ScheduleGuard | None = None
        self._dispatcher: Dispatcher | None = None
        self._reference_layer: str | None = None
        self._idle: IdleWatch | None = None
        self._last_step: StepMeta | None = None
        self._tap = Tap()
        if not self.settings.features:
            return
        refuse_unsupported(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            group_index, block_size, _ = reference_group(kv_cache_config, vllm_config)
            self._tracker = ScheduleGuard(
                ScheduleTracker(
                    group_index,
                    block_size or int(vllm_config.cache_config.block_size),
                    self._selection(),
                )
            )
            announce(str(self._kv_transfer_config.engine_id), self._tracker)

    def _selection(self) -> Selection:
        layers, settings = self.settings.ring.layers, self.settings
        count = int(self._config.model_config.get_total_num_hidden_layers())
        if layers is not None:
            layers.of(count)  # layers that the model does not have stop the start here, too
        return Selection(settings.tokens, settings.sample, layers, count)

    @property
    def requires_kv_delivery(self) -> bool:
        """Queries are caught in passing: a request never has to wait for them."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A full CUDA graph's replay runs no Python, so the hook would not see Q."""
        return bool(parse_settings(extra_config).features)

    # --- the worker's side ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The engine's caches exist: build the ring, register it, and wrap the layers."""
        if not self.settings.features:
            return
        self._dispatcher = init_dispatcher(
            self.settings.features, self._connect, self.settings.ring
        )
        names = self._dispatcher.register(kv_caches, self._cache_config, self._config)
        self._reference_layer = self._dispatcher.reference_layer()
        wrap_layers(self._config.compilation_config.static_forward_context, names, self._tap)
        self._idle = IdleWatch(self._work_idle)

    def _connect(self, feature: str, group: int = 0, /) -> QRingBufferAdapter:
        """One ring's way to the server: a connection, an instance and an account of its own."""
        parallel = self._config.parallel_config
        world_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        rank = parallel.rank % world_size
        connection = Connection.open(
            self.settings.server_url,
            client="lmcache_qclient.vllm",
            timeout_s=self.settings.connect_timeout_s,
            transport=self.settings.transport,
        )
        return QRingBufferAdapter(
            connection,
            instance_id=instance_id(str(self._kv_transfer_config.engine_id), rank, feature, group),
            model_name=self._config.model_config.model,
            world_size=world_size,
            rank=rank,
            account=Account(),
            timeout_s=self.settings.connect_timeout_s,
            heartbeat_interval_s=self.settings.heartbeat_s,
        )

    def _on_first_layer(self, layer_name: str, tensors: Tensors) -> None:
        """The step's first layer finds the rows; the later ones take the short way."""
        if self._dispatcher is None:
            return
        mapping = get_forward_context().slot_mapping
        slots = mapping.get(self._reference_layer) if isinstance(mapping, dict) else None
        self._dispatcher.save_kv_layer(layer_name, tensors, slots)
        self._tap.sink = self._dispatcher.layer_sink()
        self._tap.output_sink = self._dispatcher.output_sink()

    def has_connector_metadata(self) -> bool:
        """False: vLLM asks before every layer whether KV is to be loaded or saved, and then makes two more calls."""
        return False

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._dispatcher is None or not isinstance(connector_metadata, QServerMetadata):
            return
        if self._idle is not None:
            self._idle.step_begins()
        self._last_step = connector_metadata.step
        self._tap.sink, self._tap.output_sink = self._on_first_layer, None
        self._dispatcher.begin_step(connector_metadata.step)

    def clear_connector_metadata(self) -> None:
        """A step has ended."""
        super().clear_connector_metadata()
        self._tap.sink = self._tap.output_sink = None
        if self._idle is not None:
            self._idle.step_ended()

    def _scheduler_here(self) -> ScheduleGuard | None:
        """This engine's scheduler side, if it runs in this process: it knows who has ended since the last step."""
        return neighbour(str(self._kv_transfer_config.engine_id))

    def _work_idle(self) -> float | None:
        if self._dispatcher is None:
            return None
        scheduler = self._scheduler_here()
        if scheduler is None:
            return self._dispatcher.work_idle(None)
        ended = scheduler.ended_since(self._last_step, ENDED_AT_ONCE)
        again = self._dispatcher.work_idle(ended)
        return 0.0 if len(ended) == ENDED_AT_ONCE else again

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """KV is not ours to save; Q comes by the hook."""

    def wait_for_save(self) -> None:
        """The step's forward pass is over."""
        if self._dispatcher is not None:
            self._dispatcher.wait_for_save(EVENT_NONE_PENDING)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Take finished stores back; no request ever waits for us."""
        if self._dispatcher is not None:
            self._dispatcher.reclaim()
        return None, None

    def shutdown(self) -> None:
        """The engine ends."""
        if self._idle is not None:
            self._idle.stop()
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is None:
            return
        scheduler = self._scheduler_here()
        if scheduler is not None:
            dispatcher.work_idle(scheduler.ended_since(self._last_step, sys.maxsize))
        dispatcher.shutdown()

    # --- the scheduler's side -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Nothing is loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """A waiting request gets its blocks."""
        if self._tracker is not None:
            self._tracker.request_allocated(request)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """One step's requests, for the workers."""
        step = self._tracker.build(scheduler_output) if self._tracker is not None else StepMeta()
        return QServerMetadata(step)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended; its blocks are not needed any more."""
        if self._tracker is not None:
            self._tracker.request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for engines with several cache groups."""
        return self.request_finished(request, [])


def _join_engine_log() -> None:
    """Let our messages appear where vLLM's do: it configures its own logger only."""
    ours, theirs = logging.getLogger("lmcache_qclient"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.setLevel(theirs.getEffectiveLevel())
        for handler in theirs.handlers:
            ours.addHandler(handler)
