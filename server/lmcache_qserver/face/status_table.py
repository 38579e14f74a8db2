"""/status for a terminal."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_qserver.face.amounts import duration, plain, size

FETCH_TIMEOUT_S = 5.0
MAX_STATUS_BYTES = 64 << 20


class StatusUnavailable(Exception):
    """No status to show; the message says why and what to do."""


def fetch(http_url: str) -> tuple[str, dict[str, Any]]:
    """The body of /status, as text and decoded.

    Raises:
        StatusUnavailable: nobody answers there, or not with a status.
    """
    url = http_url.rstrip("/") + "/status"
    try:
        # No proxy: the daemon is on this host or at an address that the user gave.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as reply:
            text = reply.read(MAX_STATUS_BYTES).decode()
        report = json.loads(text)
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise StatusUnavailable(
            f"no lmcache-qserver answers at {http_url} ({reason}); start one with `lmcache-qserver start`, "
            "or give its address with --http-url"
        ) from None
    if not isinstance(report, dict) or "server" not in report:
        raise StatusUnavailable(
            f"what answers at {http_url} is not an lmcache-qserver; give its address with --http-url"
        )
    return text, report


def table(report: dict[str, Any]) -> str:
    """The report for people; what clients have named drives no terminal."""
    lines = [
        *_server(report["server"]),
        *_pool(report["pool"]),
        *_totals(report["totals"]),
        *_persistent(report["l2"]),
        *_instances(report["q_context_meta"]),
        *_models(report["models"]),
        *_coverage(report["coverage"]),
        *_rings(report["rings"], report["coverage"]["waited_s"]),
    ]
    return "\n".join(map(plain, lines))


def _server(server: dict[str, Any]) -> Iterator[str]:
    state = "ready" if server["ready"] else "not ready"
    yield f"server     {server['release']}, {state}, pid {server['pid']}, up {duration(server['uptime_s'])}"
    yield f"           {server['url']}  {server['http_url']}"
    yield f"           lifeline {server['lifeline']}"
    yield f"           chunks of {server['chunk_size']} tokens; {', '.join(server['features'])}"
    yield f"           clients: {server['clients']}, with a session: {server['sessions']}"


def _pool(pool: dict[str, Any]) -> Iterator[str]:
    capacity = pool["capacity_bytes"]
    used = capacity - pool["free_bytes"]
    yield (
        f"pool       {size(used)} of {size(capacity)} used ({100 * used / capacity:.0f} %), "
        f"{size(pool['leased_bytes'])} leased, {pool['evictions']} evictions"
    )


def _totals(totals: dict[str, Any]) -> Iterator[str]:
    refused = _reasons(totals["refused"]) or "none"
    yield f"stores     {totals['finished_stores']} of {totals['submitted_stores']} finished"
    yield (
        f"           chunks: {totals['stored']} stored ({size(totals['stored_bytes'])}), "
        f"{totals['duplicate']} duplicate, refused: {refused}"
    )


def _persistent(tier: dict[str, Any] | None) -> Iterator[str]:
    if tier is None:
        yield "persists   nothing (--l2 none)"
        return
    yield (
        f"persists   {tier['url']}, {tier['state']}: {tier['objects']} objects ({size(tier['bytes'])}) known there"
        f"{', being looked through' if tier['indexing'] else ''}"
    )
    lost = _reasons(tier["lost"]) or "none"
    yield (
        f"           {tier['written']} written, {tier['already_there']} there before, "
        f"{tier['waiting'] + tier['writing']} waiting ({size(tier['waiting_bytes'])}), lost: {lost}"
    )
    trouble = _reasons({**tier["errors"], "corrupt": tier["quarantined"]})
    yield f"           {tier['brought']} read back ({size(tier['brought_bytes'])}), trouble: {trouble or 'none'}"


def _instances(meta: dict[str, dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            instance_id,
            one["model_name"],
            str(one["world_size"]),
            "{num_layers} x {num_blocks} x {block_size} x {hidden_dim} {dtype}".format(
                **one["q_ring_layout"]
            ),
        )
        for instance_id, one in meta.items()
    ]
    yield from _section(
        "instances", ("id", "model", "world", "ring (layers x blocks x tokens x hidden)"), rows
    )


def _models(models: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            one["model_name"],
            f"{one['kv_rank']:08x}",
            one["layout_id"][:12] or "-",
            str(one["chunks"]),
            str(one["chunks"] * one["chunk_size"]),
            size(one["bytes"]),
            str(one["persisted"]),
        )
        for one in models
    ]
    yield from _section(
        "models",
        ("model", "rank", "layout", "chunks", "tokens at most", "bytes", "persisted"),
        rows,
    )


def _coverage(coverage: dict[str, Any]) -> Iterator[str]:
    computed = coverage["computed"]
    if not computed:
        yield "coverage   no worker has reported any computed token"
        return
    yield (
        f"coverage   {coverage['captured']} of {computed} computed tokens captured "
        f"({100 * coverage['captured'] / computed:.1f} %), {coverage['pending']} pending"
    )
    yield f"           lost: {_reasons(coverage['lost']) or 'none'}"
    if len(coverage["features"]) > 1:
        yield from _features(coverage["features"])


def _features(features: dict[str, dict[str, Any]]) -> Iterator[str]:
    rows = [
        (
            name,
            *(str(tokens[what]) for what in ("computed", "captured", "pending")),
            _reasons(tokens["lost"]) or "none",
        )
        for name, tokens in features.items()
    ]
    head = ("feature", "computed", "captured", "pending", "lost")
    yield from _section("features", head, rows)


def _rings(rings: dict[str, Any], waited_s: float) -> Iterator[str]:
    if not rings["blocks"]:
        yield "rings      no worker that is registered has reported"
        return
    yield (
        f"rings      {rings['used']} of {rings['blocks']} blocks in use, "
        f"{100 * rings['highest_ratio']:.0f} % of the fullest one ever"
    )
    if waited_s:
        yield f"           engines waited {waited_s:.1f} s for ring blocks"


def _section(title: str, head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    if not rows:
        yield f"{title:<10} none"
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for index, row in enumerate([tuple(head), *rows]):
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"{title if index == 0 else '':<10} {cells}".rstrip()


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(
        f"{reason} {count}"
        for reason, count in sorted(counts.items(), key=lambda item: -item[1])
        if count
    )
