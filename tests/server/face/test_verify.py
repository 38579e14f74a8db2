"""`lmcache-qserver verify` against a real daemon, whose pool a test can spoil through /proc."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lmcache_qprotocol.keys import feature_model_name
from lmcache_qprotocol.layout import layout_id
from lmcache_qprotocol.messages import RangeKey, StoreProof
from lmcache_qprotocol.stamps import first_stamp
from lmcache_qserver.cli import cli
from lmcache_qserver.testing.bare_client import (
    SMALL_LAYOUT,
    BareClient,
    BareLifeline,
    register_small_ring,
    small_ring,
)
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until

CHUNK = 64


def store_one_chunk(server: RunningDaemon, client: BareClient, lifeline: BareLifeline) -> None:
    fd, nbytes, stamps_offset = small_ring()
    with mmap.mmap(fd, nbytes) as ring:
        rows = np.random.default_rng(0).bytes(stamps_offset)
        ring[:stamps_offset] = rows
        ring[stamps_offset:] = (np.arange(CHUNK, dtype=np.int64) + first_stamp(1, 0)).tobytes()
    register_small_ring(client, lifeline, 1, CHUNK, ring=(fd, nbytes, stamps_offset))
    os.close(fd)
    key = RangeKey(
        model_name=feature_model_name("test/model", "transfer_query"),
        world_size=1,
        worker_id=0,
        start=0,
        end=CHUNK,
        chunk_hashes=(b"h" * 32,),
        layout_id=layout_id(SMALL_LAYOUT),
    )
    result = client.ask("store_q", key, 1, ((0, 1, 2, 3),), b"", StoreProof(nonces=(1,))).result
    assert result.outcome.stored == 1


def spoil_the_pool(server: RunningDaemon) -> None:
    """Change a byte of the pool behind the daemon's back, as a fault of the memory would."""
    process = Path(f"/proc/{server.pid}")
    maps = process.joinpath("maps").read_text().splitlines()
    (start,) = (int(line.split("-")[0], 16) for line in maps if "qserver-pool" in line)
    with process.joinpath("mem").open("r+b", buffering=0) as memory:
        memory.seek(start + 100)
        (byte,) = memory.read(1)
        memory.seek(start + 100)
        memory.write(bytes([byte ^ 1]))


def test_what_is_stored_is_verified_and_what_has_changed_is_dropped() -> None:
    with running_daemon(pool_bytes="16MiB", chunk_size=CHUNK) as server:
        with BareClient(server.url) as client:
            hello = client.hello()
            with BareLifeline(hello.lifeline) as lifeline:
                _, pool = lifeline.attach(hello.session)
                os.close(pool)
                store_one_chunk(server, client, lifeline)
                wait_until(lambda: server.status()["checksums"]["made"] == 1, "it has a checksum")
        sound = CliRunner().invoke(cli, ["verify", "--url", server.url])
        assert (sound.exit_code, "1 objects as they were stored" in sound.output) == (0, True)
        spoil_the_pool(server)
        spoilt = CliRunner().invoke(cli, ["verify", "--url", server.url])
        assert (spoilt.exit_code, "1 changed in memory" in spoilt.output) == (1, True)
        assert server.status()["pool"]["committed_bytes"] == 0
        assert server.status()["checksums"]["corrupt"] == 1


@pytest.mark.parametrize(
    ("url", "said"), [("tcp://127.0.0.1:1", "no answer"), ("nonsense", "tcp://HOST:PORT")]
)
def test_a_daemon_that_is_not_there_is_told_clearly(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_qserver.face.asking.HELLO_TIMEOUT_S", 0.2)
    result = CliRunner().invoke(cli, ["verify", "--url", url, "--timeout", "0.2"])
    assert result.exit_code == 1
    assert said in result.output
