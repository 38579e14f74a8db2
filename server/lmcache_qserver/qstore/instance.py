"""An instance: one registered worker process, its ring, and the lane that copies out of it.

    REGISTERING ──the lane has opened the ring──▶ LIVE ──unregister, replace, client gone, reap──▶ RELEASING ──▶ (gone)
         └──────────the ring is refused, or the client is gone─────────────────────────────────────▲

REGISTERING and RELEASING are where the loop waits for the lane; every decision is made before that wait and looked at
again behind it. `dead` says that what is still under way may not be admitted: its client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from lmcache_qprotocol.keys import feature_model_name
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import RingDescription, StoreResult, WorkerReport
from lmcache_qserver.copying import Lane, RingSource

InstanceId = int | str


class InstanceState(Enum):
    """Where an instance is in its life."""

    REGISTERING = "registering"
    LIVE = "live"
    RELEASING = "releasing"


@dataclass(eq=False, slots=True)
class Instance:
    """Compared by identity: another registration under the same id is another instance. Only the loop changes it."""

    instance_id: InstanceId
    client: Hashable
    model_name: str
    """As registered, without the feature's suffix."""
    world_size: int
    description: RingDescription
    ring: RingSource
    lane: Lane
    last_seen: float
    state: InstanceState = InstanceState.REGISTERING
    has_pinged: bool = False
    report: WorkerReport | None = None
    """The worker's last."""
    dead: bool = False
    stores: set[asyncio.Task[StoreResult]] = field(default_factory=set)
    """Stores under way."""
    release: asyncio.Task[None] | None = None
    """What everybody waits for who wants the instance gone."""
    key_model_name: str = field(init=False)
    """With the feature's suffix, as in keys."""
    layout_id: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.key_model_name = feature_model_name(self.model_name, self.description.layout.feature)
        self.layout_id = layout_id(self.description.layout)

    def is_same_registration(
        self, client: Hashable, model_name: str, world_size: int, description: RingDescription
    ) -> bool:
        """The same worker says the same thing about the same ring again."""
        return (
            self.state is InstanceState.LIVE
            and self.client == client
            and self.model_name == model_name
            and self.world_size == world_size
            and self.description == description
        )
