"""The table of features: a new tensor kind is a file and a row here, and nothing else changes."""

from __future__ import annotations

from lmcache_qclient.capture.tensor_kind import TensorKind
from lmcache_qclient.features.key import KEY
from lmcache_qclient.features.query import QUERY
from lmcache_qclient.features.value import VALUE

FEATURE_REGISTRY: dict[str, TensorKind] = {
    kind.name: kind
    for kind in (
        QUERY,
        KEY,
        VALUE,
    )
}  # fmt: skip
"""By name; every name is one that the protocol knows (`FEATURE_SUFFIX`)."""
