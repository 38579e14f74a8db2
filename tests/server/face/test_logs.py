"""Log lines: one event a line, stable keys, nothing secret, no flood."""

from __future__ import annotations

import json
import logging
import re
from contextlib import ExitStack
from typing import Any

import pytest

from lmcache_qprotocol.errors import RequestError
from lmcache_qprotocol.keys import KeyFamily, ObjectKey, salt_digest
from lmcache_qprotocol.messages import StoreProof
from lmcache_qserver.face.logs import JsonFormatter, TextFormatter
from lmcache_qserver.log_fields import OWN_KEYS, told
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline, register_small_ring
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from tests.server.face.wire_session import TOKENS, wire_session

SALT = "marker-salt-90210"
FIRST_TOKEN = 8_675_309
"""Of a run of tokens that nothing else in a log looks like."""
TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ +[\w.]+: ")


def record(message: str, *arguments: Any, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, "", 0, message, arguments, None)
    made.__dict__.update(extra)
    return made


def test_fields_stand_behind_the_words_and_are_keys_in_json() -> None:
    one = record("a %s", "word", **told(instance=1, cause="x y"))
    assert TextFormatter().format(one).endswith("WARNING a.b: a word instance=1 cause='x y'")
    line = json.loads(JsonFormatter().format(one))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "a.b",
        "message": "a word",
        "instance": 1,
        "cause": "x y",
    }
    for key in OWN_KEYS:
        with pytest.raises(AssertionError):
            told(**{key: 1})


@pytest.mark.parametrize(
    "sent", ["a\n2026-11-30 00:00:00,000 INFO a: forged", "\r\x1b[2J\x00\u2028"]
)
def test_no_peer_forges_a_line(sent: str) -> None:
    for one in (record("%s", sent), record("word", **told(client=sent))):
        text = TextFormatter().format(one)
        assert [line for line in text.split("\n")[1:] if not line.startswith("    ")] == []
        assert not re.search(r"[\x00-\x09\x0b-\x1f\u2028]", text)
        assert "\n" not in JsonFormatter().format(one)


def test_a_traceback_is_one_json_line_and_indented_text() -> None:
    try:
        raise KeyError(ObjectKey(family=family(), chunk_hash=bytes(32)))
    except KeyError as error:
        one = record("failed", exc_info=(KeyError, error, error.__traceback__))
    line = JsonFormatter().format(one)
    assert "\n" not in line
    assert "Traceback" in json.loads(line)["exception"]
    text = TextFormatter().format(one)
    assert all(rest.startswith("    ") for rest in text.split("\n")[1:])
    for shown in (line, text):
        assert SALT not in shown, "a key shows its salt's digest"
        assert salt_digest(SALT) in shown


def family() -> KeyFamily:
    return KeyFamily(model_name="m##query", world_size=1, kv_rank=0, cache_salt=SALT)


def work(daemon: RunningDaemon) -> None:
    """A store, a duplicate, a refusal, checks that fail, reads that hit and miss, questions, garbage, a dead worker."""
    tokens = range(FIRST_TOKEN, FIRST_TOKEN + TOKENS)
    others = range(FIRST_TOKEN + 100, FIRST_TOKEN + 100 + TOKENS)
    with wire_session(daemon, "w\nforged", "org/model", SALT) as session:
        assert session.store(tokens, "request-1").stored == 1
        assert session.store(tokens, "request-2").duplicate == 1
        assert session.store(others, "request-3", spoil=True).refused
        proof = StoreProof(nonces=(1,))
        for instance_id, blocks in (("nobody", (0,)), ("w\nforged", (9,)), ("w\nforged", ())):
            with pytest.raises(RequestError):
                session.client.ask(
                    "store_q", session.key(tokens), instance_id, (blocks,), b"", proof
                )
        assert session.retrieve(tokens).chunks
        assert session.retrieve(others).missing
        session.client.ask("lookup_q", session.query(tokens[:5]))
        with pytest.raises(RequestError):
            session.client.ask("release_q", (99,))
        wait_until(lambda: daemon.status()["totals"]["finished_stores"] == 3, "all are told")
        with BareClient(daemon.url) as legacy:
            legacy.send([b"\x01"])
            legacy.send([b"\x02", b"\x05", session.salt.encode(), b"\xc1"])
            legacy.send([b"\x03", b"\x16", b"\xa9" + SALT[:9].encode()])
            legacy.receive()
        with BareLifeline(daemon.lifeline) as lifeline:
            lifeline.exchange(SALT.encode())
    wait_until(lambda: not daemon.status()["registered_q_ids"], "the worker has gone")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_whole_session_at_debug_level_tells_no_salt_and_no_token(log_format: str) -> None:
    with running_daemon(chunk_size=TOKENS, log_format=log_format, log_level="debug") as daemon:
        work(daemon)
        log = daemon.log()
    assert SALT not in log
    assert "marker" not in log
    assert str(FIRST_TOKEN)[:-2] not in log
    assert FIRST_TOKEN.to_bytes(4, "big").hex() not in log
    assert log.count("store finished") == 3
    if log_format == "text":
        assert all(TEXT_LINE.match(line) or line[:4] == "    " for line in log.splitlines())
        return
    lines = [json.loads(line) for line in log.splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    stores = [line for line in lines if line["message"] == "store finished"]
    keys = {"instance", "model", "request", "stored", "duplicate", "refused", "bytes", "seconds"}
    assert all(line.keys() - OWN_KEYS == keys for line in stores)
    assert [line["request"] for line in stores] == ["request-1", "request-2", "request-3"]
    assert stores[2]["refused"] == {"stamp_mismatch": 1}


def test_levels_leave_lines_out() -> None:
    with running_daemon(chunk_size=TOKENS) as daemon:
        with wire_session(daemon) as session:
            session.store(range(TOKENS))
            wait_until(lambda: daemon.status()["totals"]["finished_stores"] == 1, "it is told")
        assert "store finished" not in daemon.log()
    with running_daemon(log_level="error") as daemon:
        pass
    assert daemon.process.returncode == 0


def test_complaints_about_peers_are_rate_limited() -> None:
    """Each kind has a line in ten seconds at most, however often it is provoked."""
    with running_daemon(chunk_size=TOKENS) as daemon:
        with BareClient(daemon.url) as client:
            for _ in range(300):
                client.send([b"\x01"])
            unanswerable = "lmcache_qserver_messages_unanswerable_total"
            wait_until(lambda: daemon.metrics()[unanswerable] == 300, "all are counted")
        silenced = "lmcache_qserver_failures_silenced_total"
        with ExitStack() as stack:
            for number in range(100):
                client = stack.enter_context(BareClient(daemon.url))
                client.send([b"\x01", b"\xbe" + f"{number:030}".encode()])
            wait_until(lambda: daemon.metrics()[silenced] == 100, "all are counted")
        log = daemon.log()
    assert log.count("can't be answered") <= 3
    assert log.count("gets no answer") <= 3
    assert len(log.splitlines()) < 12
    assert max(map(len, log.splitlines())) < 1000, "nor is a line as long as a peer likes"


def test_workers_that_come_and_go_flood_no_log() -> None:
    with running_daemon(chunk_size=TOKENS) as daemon:
        for number in range(20):
            with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
                lifeline.attach(client.hello().session)
                register_small_ring(client, lifeline, number, TOKENS)
                client.ask("unregister_q_cache", number)
        wait_until(lambda: daemon.metrics()["lmcache_qserver_lifelines"] == 0, "all have gone")
        assert len(daemon.log().splitlines()) <= 2 + 20, "a line for each that hangs up"
