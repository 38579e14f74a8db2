"""Metrics that are read at each scrape, each in one line."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

Values = Mapping[str, float]
"""By the value of a label."""


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """One gauge without labels."""
    return GaugeMetricFamily(f"lmcache_qserver_{name}", text, value=value)


def gauges(name: str, text: str, label: str, values: Values) -> GaugeMetricFamily:
    """One gauge per value of a label."""
    family = GaugeMetricFamily(f"lmcache_qserver_{name}", text, labels=[label])
    for label_value, number in values.items():
        family.add_metric([label_value], number)
    return family


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """One counter without labels."""
    return CounterMetricFamily(f"lmcache_qserver_{name}", text, value=value)


def counters(name: str, text: str, label: str, values: Values) -> CounterMetricFamily:
    """One counter per value of a label."""
    family = CounterMetricFamily(f"lmcache_qserver_{name}", text, labels=[label])
    for label_value, number in values.items():
        family.add_metric([label_value], number)
    return family
