"""A server that starts on a full disk: when it answers, how long it indexes, and what that takes.

Makes 100,000 small objects, each whole and with a name of its own, then starts the daemon on the folder and on an empty
one by turns. Seconds are from exec to the first answer of a lookup, and of a retrieve that brings an object back. The
file system's caches are warm: the objects have just been made.

`python -m benchmarks.tier_start --folder DISK` (default: the current folder's disk). Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.start import beyond_pool_bytes
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, kv_rank
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import ChunkQuery, RetrieveReply
from lmcache_qserver.testing.bare_client import SMALL_LAYOUT, BareClient, BareLifeline
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from lmcache_qserver.tier.format import encode, header_of
from lmcache_qserver.tier.paths import name_of

OBJECTS = 100_000
STARTS = 5
CHUNK = BLOCK_SIZE = 16
CREATED = 1.8e9
INDEX_S = 300.0
FAMILY = KeyFamily(
    model_name="bench##query",
    world_size=1,
    kv_rank=kv_rank(1, 0),
    layout_id=layout_id(SMALL_LAYOUT),
)
DATA = bytes(range(256)) * (CHUNK * SMALL_LAYOUT.token_bytes // 256)


def key(index: int) -> ObjectKey:
    """Spread over all folders, as hashes are."""
    name = (index * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") + index.to_bytes(24, "big")
    return ObjectKey(family=FAMILY, chunk_hash=name)


def parent(index: int) -> bytes:
    """The hash of the chunk before it."""
    return key(index + OBJECTS).chunk_hash


def make_objects(folder: Path, count: int) -> None:
    """Write them as files, as a server would, but without waiting for the disk after each."""
    folder.mkdir(mode=0o700)
    made: set[Path] = set()
    for index in range(count):
        one = key(index)
        header = header_of(
            one,
            SMALL_LAYOUT,
            BLOCK_SIZE,
            CHUNK,
            (0, CHUNK),
            CREATED,
            start=CHUNK,
            parent=parent(index),
        )
        path = folder / name_of(one, parent(index))
        if path.parent not in made:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made.add(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.writev(fd, [encode(header, memoryview(DATA)), DATA])
        os.close(fd)
    os.sync()


class Reader:
    """One client, connected as soon as the daemon is ready."""

    def __init__(self, daemon: RunningDaemon) -> None:
        self.client = BareClient(daemon.url)
        self.lifeline = BareLifeline(daemon.lifeline)
        _, self._fd = self.lifeline.attach(self.client.hello().session)

    def query(self, index: int) -> ChunkQuery:
        """Asks for one object."""
        return ChunkQuery(
            family=FAMILY, chunk_hashes=(key(index).chunk_hash,), parent_hash=parent(index)
        )

    def lookup(self, index: int) -> int:
        """Chunks that are there."""
        found: int = self.client.ask("lookup_q", self.query(index)).result.prefix
        return found

    def retrieve(self, index: int) -> int:
        """Chunks that were leased."""
        reply: RetrieveReply = self.client.ask("retrieve_q", self.query(index)).result
        self.client.ask("release_q", (reply.lease_id,) if reply.lease_id else ())
        return len(reply.chunks)

    def close(self) -> None:
        """Hang up."""
        self.lifeline.socket.close()
        self.client.socket.close()
        os.close(self._fd)


def processor_s(pid: int) -> float:
    """Processor time of a process so far; on a machine that others use, it says more than the clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_once(folder: Path, count: int, at: int) -> dict[str, float]:
    """One start; seconds and megabytes (1e6).

    Args:
        count: objects in the folder.
        at: an object that nobody has asked for.
    """
    there = int(count > 0)
    began = time.monotonic()
    with running_daemon(l2=f"file://{folder}", chunk_size=CHUNK, pool_bytes="64MiB") as daemon:
        reader = Reader(daemon)
        assert reader.lookup(at) == there
        lookup_s = time.monotonic() - began
        assert reader.retrieve(at) == there
        retrieve_s = time.monotonic() - began
        cpu_s = processor_s(daemon.pid)
        rss_first = beyond_pool_bytes(daemon.pid) / 1e6
        slowest = 0.0
        number = 0
        while daemon.status()["l2"]["indexing"]:
            for _ in range(20):
                number += 1
                asked = time.monotonic()
                assert reader.retrieve((at + number) % max(count, 1)) == there
                slowest = max(slowest, time.monotonic() - asked)
            assert time.monotonic() - began < INDEX_S
        wait_until(lambda: daemon.status()["l2"]["objects"] == count, "all are indexed")
        status = daemon.status()["l2"]
        reader.close()
        return {
            "lookup_s": lookup_s,
            "retrieve_s": retrieve_s,
            "cpu_s_at_first_answer": cpu_s,
            "index_s": status["index_s"],
            "slowest_retrieve_meanwhile_ms": slowest * 1000,
            "rss_mb_at_first_answer": rss_first,
            "rss_mb_indexed": beyond_pool_bytes(daemon.pid) / 1e6,
        }


def median_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure; and the slowest answers."""
    figures = {name: statistics.median(one[name] for one in samples) for name in samples[0]}
    for name in ("lookup_s", "retrieve_s"):
        figures[f"{name}_slowest"] = max(one[name] for one in samples)
    return {name: round(value, 3) for name, value in figures.items()}


def measure(disk: Path, count: int, starts: int) -> dict[str, Any]:
    """Medians of several starts."""
    with tempfile.TemporaryDirectory(dir=disk, prefix="tier-start-") as made:
        full, empty = Path(made) / "full", Path(made) / "empty"
        began = time.monotonic()
        make_objects(full, count)
        empty.mkdir(mode=0o700)
        made_s = time.monotonic() - began
        samples: dict[str, list[dict[str, float]]] = {"empty": [], "full": []}
        for turn in range(starts):
            samples["empty"].append(start_once(empty, 0, turn))
            samples["full"].append(start_once(full, count, turn * count // starts))
        return {
            "objects": count,
            "made_s": round(made_s, 1),
            **{name: median_of(some) for name, some in samples.items()},
        }


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure on")
    parser.add_argument("--objects", type=int, default=OBJECTS)
    parser.add_argument("--starts", type=int, default=STARTS)
    options = parser.parse_args()
    print(
        json.dumps(
            measure(Path(options.folder).resolve(), options.objects, options.starts), indent=2
        )
    )


if __name__ == "__main__":
    main()
