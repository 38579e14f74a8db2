"""`flush` and `persisted`, against the real daemon with a persistent tier and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmcache_qclient.qcache import NotPersisted, connect
from lmcache_qserver.testing.daemon import running_daemon
from tests.worker_client.qcache.engine import CHUNK, Engine, layout_of
from tests.worker_client.qcache.test_store import TOKENS, same, values

MODEL = "org/model"


@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_what_is_flushed_outlives_the_server(tmp_path: Path, transport: str) -> None:
    settings: dict[str, Any] = {"chunk_size": CHUNK, "allow_inline": True}
    settings["l2"] = f"file://{tmp_path}/l2"
    tensor = values()
    with running_daemon(**settings) as daemon:
        engine = Engine(daemon.url, layout_of(), MODEL)
        with connect(daemon.url, daemon.http_url, MODEL, transport=transport) as cache:
            cache.store(TOKENS, tensor, cache_salt="s")
            assert cache.flush() is True
            found = cache.retrieve(TOKENS, cache_salt="s")
            assert found.persisted
            assert same(found.tensor, tensor)
        engine.close()
        daemon.process.kill()
        daemon.process.wait()
    with (
        running_daemon(**settings) as daemon,
        connect(daemon.url, daemon.http_url, MODEL, transport=transport) as cache,
    ):
        found = cache.retrieve(TOKENS, cache_salt="s")
        assert same(found.tensor, tensor)
        assert found.persisted
        assert same(cache.retrieve(TOKENS[:20], cache_salt="s").tensor, tensor[:, :20])
        again = cache.store(TOKENS, tensor, cache_salt="s")
        assert (again.stored, again.duplicate) == (0, 6)


def test_without_a_persistent_tier() -> None:
    with running_daemon(chunk_size=CHUNK, l2="none") as daemon:
        engine = Engine(daemon.url, layout_of(), MODEL)
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            cache.store(TOKENS, values(), cache_salt="s")
            with pytest.raises(NotPersisted, match="no persistent tier"):
                cache.flush()
            found = cache.retrieve(TOKENS, cache_salt="s")
            assert found.num_tokens == len(TOKENS)
            assert not found.persisted
            for timeout_s in (-1, 3601, float("nan")):
                with pytest.raises(ValueError, match="timeout_s"):
                    cache.flush(timeout_s)
        engine.close()


def test_a_server_that_was_restarted_since_the_store_can_not_say(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"chunk_size": CHUNK, "l2": f"file://{tmp_path}/l2"}
    with running_daemon(**settings) as daemon:
        engine = Engine(daemon.url, layout_of(), MODEL)
        cache = connect(daemon.url, daemon.http_url, MODEL)
        cache.store(TOKENS, values(), cache_salt="s")
        engine.close()
        url, http_port = daemon.url, daemon.http_url.rpartition(":")[2]
        daemon.process.kill()
        daemon.process.wait()
    with running_daemon(**settings, url=url, http_port=http_port):
        with pytest.raises(NotPersisted, match="restarted"):
            cache.flush()
        cache.store(TOKENS, values(), cache_salt="s")
        assert cache.flush()
        cache.close()


@pytest.mark.parametrize("transport", ["shm", "inline"])
def test_a_flush_that_loses_its_server_comes_back(tmp_path: Path, transport: str) -> None:
    """Nothing was stored by this context, so any server may answer."""
    settings: dict[str, Any] = {"chunk_size": CHUNK, "allow_inline": True}
    settings["l2"] = f"file://{tmp_path}/l2"
    with running_daemon(**settings) as daemon:
        cache = connect(daemon.url, daemon.http_url, MODEL, transport=transport)
        url, http_port = daemon.url, daemon.http_url.rpartition(":")[2]
        daemon.process.kill()
        daemon.process.wait()
    with running_daemon(**settings, url=url, http_port=http_port):
        if transport == "shm":
            assert cache.flush()
        else:  # the first answer of the new server is how it is noticed, so the former one was asked
            with pytest.raises(NotPersisted, match="restarted"):
                cache.flush()
            assert cache.flush()
        cache.close()


def test_the_wait_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_daemon(chunk_size=CHUNK, l2=f"file://{tmp_path}/l2") as daemon:
        engine = Engine(daemon.url, layout_of(), MODEL)
        with connect(daemon.url, daemon.http_url, MODEL) as cache:
            wait, looked_up = cache._session.wait, []

            def look_up_meanwhile(*arguments: Any) -> Any:
                looked_up.append(cache.lookup(TOKENS).num_tokens)
                return wait(*arguments)

            monkeypatch.setattr(cache._session, "wait", look_up_meanwhile)
            cache.flush()
            assert looked_up == [0]
        engine.close()
