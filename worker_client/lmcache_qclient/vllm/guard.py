"""Between vLLM's scheduler and the tracker: whatever fails in our bookkeeping, the engine must go on.

A hook that fails is logged once a kind and counted; what it should have told is told as lost
(`ScheduleTracker.lose_*`), so that no later row is stored under a wrong name.
"""

from __future__ import annotations

import logging
from typing import Any

from lmcache_qclient.capture.step import FinishedRequest, StepMeta
from lmcache_qclient.vllm.schedule import ScheduleTracker

logger = logging.getLogger(__name__)


class ScheduleGuard:
    """The tracker's hooks; none of them raises.

    Args:
        tracker: whose hooks they are.

    Attributes:
        failures: hooks that have failed.
    """

    def __init__(self, tracker: ScheduleTracker) -> None:
        self.failures = 0
        self._last_step: StepMeta | None = None
        self._tracker = tracker
        self._logged: set[str] = set()

    def request_allocated(self, request: Any) -> None:
        """See `ScheduleTracker`. A request that is missed here is strange to it from its first step on."""
        try:
            self._tracker.request_allocated(request)
        except Exception as error:  # noqa: BLE001 - the engine would die of it
            self._failed("update_state_after_alloc", error)

    def request_finished(self, request: Any) -> None:
        """See `ScheduleTracker`."""
        try:
            self._tracker.request_finished(request)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("request_finished", error)
            self._tracker.lose_request(getattr(request, "request_id", ""))

    def build(self, output: Any) -> StepMeta:
        """See `ScheduleTracker`; a step without requests when it can't be told."""
        try:
            self._last_step = self._tracker.build(output)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("build_connector_meta", error)
            self._last_step = self._tracker.lose_step(output)
        return self._last_step

    def ended_since(self, step: StepMeta | None, most: int) -> tuple[FinishedRequest, ...]:
        """At most `most` of the requests that have ended since the last step; none when that is not `step`.

        For a worker in this process that has done `step` and sees no other come. A step that is scheduled and not done
        yet may still compute for a request that has ended.
        """
        return self._tracker.take_finished(most) if step is self._last_step else ()

    def _failed(self, hook: str, error: Exception) -> None:
        self.failures += 1
        if hook in self._logged:
            return
        self._logged.add(hook)
        logger.error(
            "%s failed, the engine goes on (logged once a hook): requests that were under way are captured no more",
            hook,
            exc_info=error,
        )
