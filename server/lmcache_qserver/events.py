"""What happened to a store, for whoever counts it: metrics, logs, a page.

Every store that passes its checks publishes StoreSubmitted, then StoreStart, then StoreEnd, each once, whatever
becomes of it. The bus is synchronous and lives on the event loop, so a subscriber must be quick and never block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from lmcache_qprotocol.reasons import LossReason

logger = logging.getLogger(__name__)


class StoreSubmitted(msgspec.Struct, frozen=True, kw_only=True):
    """MP_STORE_SUBMITTED: a store has passed its checks.

    Attributes:
        session: the request id that the engine gave.
        instance_id: who stores.
        model_name: as in the object keys, with the feature's suffix.
        device: where the ring lies: "cpu", "cuda:0".
    """

    session: str
    instance_id: int | str
    model_name: str
    device: str = "cpu"


class StoreStart(msgspec.Struct, frozen=True, kw_only=True):
    """MP_STORE_START: the store's turn has come; attributes as in `StoreSubmitted`."""

    session: str
    instance_id: int | str
    model_name: str
    device: str = "cpu"


class StoreEnd(msgspec.Struct, frozen=True, kw_only=True):
    """MP_STORE_END: the store is over; the first four attributes as in `StoreSubmitted`.

    Attributes:
        stored, duplicate, refused: chunks, as in `StoreOutcome`.
        nbytes: bytes of the chunks stored.
        seconds: from submitted to end.
    """

    session: str
    instance_id: int | str
    model_name: str
    device: str = "cpu"
    stored: int = 0
    duplicate: int = 0
    refused: dict[LossReason, int] = {}
    nbytes: int = 0
    seconds: float = 0.0


Event = StoreSubmitted | StoreStart | StoreEnd
Subscriber = Callable[[Event], None]


class EventBus:
    """Hands each event to every subscriber, in the order of subscription."""

    def __init__(self) -> None:
        self._subscribers: list[Subscriber] = []

    def subscribe(self, callback: Subscriber) -> None:
        """Call `callback` with every event from now on."""
        self._subscribers.append(callback)

    def publish(self, event: Event) -> None:
        """A subscriber that fails is logged, and hurts neither the publisher nor the other subscribers."""
        for subscriber in tuple(self._subscribers):
            try:
                subscriber(event)
            except Exception:
                logger.exception("a subscriber failed on %s", type(event).__name__)
