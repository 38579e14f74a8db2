"""Which instances there are, and which of them have not been heard of for too long. No I/O; time is an argument."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from lmcache_qserver.qstore.instance import Instance, InstanceId, InstanceState


class Registry:
    """Instances by id.

    Args:
        reap_timeout_s: an instance that has pinged may be silent for so long; 0 turns reaping off.
        registration_grace_s: and one that never has, for so long (a model may take long to load).
    """

    def __init__(self, reap_timeout_s: float, registration_grace_s: float) -> None:
        self.reap_timeout_s = reap_timeout_s
        self.registration_grace_s = registration_grace_s
        self._instances: dict[InstanceId, Instance] = {}

    def __iter__(self) -> Iterator[Instance]:
        """A snapshot of all instances, in whatever state."""
        return iter(tuple(self._instances.values()))

    def get(self, instance_id: InstanceId) -> Instance | None:
        """The instance that holds the id now, in whatever state."""
        return self._instances.get(instance_id)

    def put(self, instance: Instance) -> None:
        """The id is this instance's now; who had it before is on its way out."""
        self._instances[instance.instance_id] = instance

    def remove(self, instance: Instance) -> None:
        """Forget it, unless its id has passed to another instance meanwhile."""
        if self._instances.get(instance.instance_id) is instance:
            del self._instances[instance.instance_id]

    def live(self) -> list[Instance]:
        """Instances that may store."""
        return [instance for instance in self if instance.state is InstanceState.LIVE]

    def of_client(self, client: Hashable) -> list[Instance]:
        """Instances of one connection, in whatever state."""
        return [instance for instance in self if instance.client == client]

    def stale(self, now: float) -> list[Instance]:
        """LIVE instances to be reaped."""
        if self.reap_timeout_s <= 0:
            return []
        return [instance for instance in self.live() if self._is_stale(instance, now)]

    def _is_stale(self, instance: Instance, now: float) -> bool:
        allowed_s = self.reap_timeout_s if instance.has_pinged else self.registration_grace_s
        return now - instance.last_seen > allowed_s
