"""Metrics of the persistent tier; all are there, at 0, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from lmcache_qserver.face.families import counter, counters, gauge
from lmcache_qserver.status_report import NO_TIER, TierReport


def tier_metrics(report: TierReport | None) -> Iterator[Metric]:
    """What `/status` says under `l2`."""
    tier = report or NO_TIER
    yield gauge(
        "l2_ready", "1 when the persistent tier can be written and read.", tier.state == "ready"
    )
    yield counter("l2_submitted", "Objects stored that are to be persisted.", tier.submitted)
    yield counters(
        "l2_persisted",
        "Objects that are in the persistent tier, written by this server or there before.",
        "outcome",
        {"written": tier.written, "already_there": tier.already_there},
    )
    yield counter("l2_written_bytes", "Bytes written, headers included.", tier.written_bytes)
    yield counters(
        "l2_lost", "Objects that are not persisted and never will be.", "reason", tier.lost
    )
    yield counters("l2_write_errors", "Attempts to write that failed.", "code", tier.errors)
    yield gauge(
        "l2_waiting", "Objects that wait to be written, or are being.", tier.waiting + tier.writing
    )
    yield gauge("l2_waiting_bytes", "Bytes of those that wait.", tier.waiting_bytes)
    yield gauge("l2_pinned_bytes", "Bytes of the pool that wait to be written.", tier.pinned_bytes)
    yield counter("l2_read", "Objects read back into the pool.", tier.brought)
    yield counter("l2_read_bytes", "Their bytes.", tier.brought_bytes)
    yield counter(
        "l2_absent", "Objects asked for that the persistent tier has not either.", tier.absent
    )
    yield counters(
        "l2_read_misses",
        "Objects that are there, or may be, and could not be given; unavailable counts questions.",
        "reason",
        tier.missed,
    )
    yield counter("l2_quarantined", "Corrupt objects put aside.", tier.quarantined)
    yield gauge(
        "l2_objects",
        "Objects known to lie there; of a bucket those that were written or read.",
        tier.objects,
    )
    yield gauge("l2_bytes", "Their bytes, headers included.", tier.bytes)
    yield counters("l2_swept", "Objects deleted for age or size.", "reason", tier.swept)
