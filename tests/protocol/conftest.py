"""Property tests run on busy machines: an example may be slow, only its result counts."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("protocol", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("protocol")
