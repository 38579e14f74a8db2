"""The table of features: a new tensor kind is a file beside this one and a row here, and nothing else changes."""

from __future__ import annotations

from importlib import import_module

from lmcache_qclient.capture.tensor_kind import TensorKind

FILES = (
    "query",
    "key",
    "value",
    "attention_output",
)
"""Each has a `FEATURE`, whose name is one that the protocol knows (`FEATURE_SUFFIX`)."""


def _feature(file: str) -> TensorKind:
    feature: TensorKind = import_module(f"{__package__}.{file}").FEATURE
    return feature


FEATURE_REGISTRY: dict[str, TensorKind] = {
    feature.name: feature for feature in map(_feature, FILES)
}
"""By name."""
