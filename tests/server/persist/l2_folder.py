"""A server's persistent tier in a folder, and what is looked at from outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmcache_qprotocol.keys import ObjectKey
from lmcache_qprotocol.messages import FlushReply
from lmcache_qserver.testing.daemon import RunningDaemon, wait_until
from lmcache_qserver.tier.paths import name_of
from tests.server.wire_worker import WireWorker

FLUSH_MS = 30_000


def url_of(folder: Path) -> str:
    """For `--l2`."""
    return f"file://{folder}"


def objects(folder: Path) -> list[Path]:
    """All objects that have their name."""
    return sorted(folder.glob("v1/**/*.safetensors"))


def left_behind(folder: Path) -> list[Path]:
    """Files that were being written."""
    return sorted((folder / ".tmp").iterdir())


def quarantined(folder: Path) -> list[Path]:
    """Files that were put aside."""
    return sorted(path for path in folder.glob("quarantine/**/*") if path.is_file())


def file_of(folder: Path, worker: WireWorker, name: bytes, salt: str = "") -> Path:
    """Where a chunk's object lies that `WireWorker.store` has made: it does not tell the chunk before."""
    return folder / name_of(ObjectKey(family=worker.family(salt), chunk_hash=name))


def tier(daemon: RunningDaemon) -> dict[str, Any]:
    """`l2` of `/status`; its sum must be right whenever one looks."""
    report: dict[str, Any] = daemon.status()["l2"]
    ended = report["written"] + report["already_there"] + sum(report["lost"].values())
    assert report["submitted"] == ended + report["waiting"] + report["writing"], report
    return report


def wait_for_index(daemon: RunningDaemon) -> dict[str, Any]:
    """Until the server knows what lies there."""
    wait_until(
        lambda: (now := tier(daemon))["state"] == "ready" and not now["indexing"],
        "the persistent tier is indexed",
    )
    return tier(daemon)


def flush(worker: WireWorker, timeout_ms: int = FLUSH_MS) -> FlushReply:
    """Everything stored before is to be persisted."""
    worker.client.socket.RCVTIMEO = timeout_ms + 10_000
    reply: FlushReply = worker.client.ask("flush_q", timeout_ms).result
    return reply


def persist(worker: WireWorker) -> None:
    """Everything stored before is persisted."""
    reply = flush(worker)
    assert (reply.persisted, reply.waiting) == (True, 0)


def persisted(worker: WireWorker, *names: bytes) -> list[bool]:
    """Whether these chunks, which the pool holds, are persisted, as a reader is told."""
    reply = worker.retrieve(*names)
    worker.client.ask("release_q", (reply.lease_id,))
    assert [chunk.index for chunk in reply.chunks] == list(range(len(names)))
    return [chunk.persisted for chunk in reply.chunks]
