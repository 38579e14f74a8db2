"""The table of features: a new tensor kind is a new row, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

from lmcache_qclient.capture.adapter import QRingBufferAdapter
from lmcache_qclient.capture.ring_size import RingSettings
from lmcache_qclient.features.feature import Feature
from lmcache_qclient.features.query import QTensorFeature

TRANSFER_QUERY = "transfer_query"

FEATURE_REGISTRY: dict[str, Callable[[QRingBufferAdapter, RingSettings], Feature]] = {
    TRANSFER_QUERY: QTensorFeature,
}
