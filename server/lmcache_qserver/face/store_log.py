"""A line for every store that is over, for who looks for one: at level debug only."""

from __future__ import annotations

import logging

from lmcache_qserver.events import Event, EventBus, StoreEnd
from lmcache_qserver.log_fields import told

log = logging.getLogger(__name__)


def log_stores(bus: EventBus) -> None:
    """Subscribe, if the lines would be seen: otherwise stores pay nothing."""
    if log.isEnabledFor(logging.DEBUG):
        bus.subscribe(_log)


def _log(event: Event) -> None:
    if not isinstance(event, StoreEnd):
        return
    log.debug(
        "store finished",
        extra=told(
            instance=event.instance_id,
            model=event.model_name,
            request=event.session,
            stored=event.stored,
            duplicate=event.duplicate,
            refused={reason.value: chunks for reason, chunks in event.refused.items()},
            bytes=event.nbytes,
            seconds=round(event.seconds, 6),
        ),
    )
