"""The real Prometheus: its checks pass, and it scrapes a live daemon as /status tells it."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lmcache_qserver.testing.daemon import running_daemon, wait_until
from tests.prometheus.server import Prometheus, running_prometheus
from tests.server.face.test_metrics_document import ALERTS, expressions
from tests.server.face.wire_session import TOKENS, wire_session

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        shutil.which("prometheus") is None or shutil.which("promtool") is None,
        reason="prometheus and promtool are not installed (Debian package prometheus)",
    ),
]
ALERT_TESTS = Path(__file__).parent / "alerts_test.yml"
SCRAPE_CONFIG = ALERTS.parent / "prometheus.yml"


def promtool(*arguments: str, text: str = "") -> tuple[int, str]:
    """Exit code, and all that it says."""
    done = subprocess.run(
        ["promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_promtool_has_nothing_to_say_of_our_metrics() -> None:
    with running_daemon(chunk_size=TOKENS) as daemon:
        fresh = daemon.get("/metrics")
        with wire_session(daemon) as session:
            session.store(range(TOKENS))
            busy = daemon.get("/metrics")
    for text in (fresh, busy):
        assert promtool("check", "metrics", text=text) == (0, "")
    code, said = promtool("check", "metrics", text=busy.replace("submitted_total", "submitted"))
    assert (code, '"_total" suffix' in said) == (3, True), "it would have found a wrong name"


def test_promtool_takes_the_configuration_and_the_alerts(tmp_path: Path) -> None:
    code, said = promtool("check", "rules", str(ALERTS))
    assert (code, "SUCCESS" in said) == (0, True), said
    code, said = promtool("check", "config", str(SCRAPE_CONFIG))
    assert (code, "SUCCESS: 1 rule files found" in said) == (0, True), said
    broken = tmp_path / "alerts.yml"
    broken.write_text(ALERTS.read_text().replace("== 0", "=== 0", 1))
    assert promtool("check", "rules", str(broken))[0] != 0


def test_alerts_fire_when_they_should_and_only_then() -> None:
    names = set(re.findall(r"- alert: (\w+)", ALERTS.read_text()))
    assert set(re.findall(r"alertname: (\w+)", ALERT_TESTS.read_text())) == names
    assert set(re.findall(r'alertname="(\w+)"', ALERT_TESTS.read_text())) == names
    code, said = promtool("test", "rules", str(ALERT_TESTS))
    assert (code, "SUCCESS" in said) == (0, True), said


def test_a_real_prometheus_scrapes_a_daemon_at_work(tmp_path: Path) -> None:
    with (
        running_daemon(chunk_size=TOKENS) as daemon,
        running_prometheus(tmp_path, daemon.http_url, ALERTS) as prometheus,
        wire_session(daemon) as session,
    ):
        wait_until(lambda: prometheus.value("up") == 1, "the first scrape")
        place = 0
        while (prometheus.value("count_over_time(up[1m])") or 0) < 6:
            place += 1
            tokens = range(place * TOKENS, (place + 1) * TOKENS)
            session.store(tokens, spoil=place % 3 == 0)
            session.store(tokens)
            session.retrieve(tokens)
        assert place > 2
        submitted = 2 * place
        wait_until(lambda: daemon.status()["totals"]["finished_stores"] == submitted, "all ended")
        check_totals(prometheus, daemon.status()["totals"])
        check_questions(prometheus)
        check_scrapes(prometheus)


def check_totals(prometheus: Prometheus, totals: dict[str, Any]) -> None:
    """What Prometheus holds is what /status tells."""
    for query, expected in {
        "lmcache_mp_store_submitted_total": totals["submitted_stores"],
        "sum(lmcache_mp_store_finished_total)": totals["finished_stores"],
        "lmcache_mp_store_chunks_total{outcome='stored'}": totals["stored"],
        "lmcache_mp_store_chunks_total{outcome='duplicate'}": totals["duplicate"],
        "lmcache_mp_store_bytes_total": totals["stored_bytes"],
        "lmcache_mp_store_seconds_count": totals["finished_stores"],
        "lmcache_mp_store_chunks_total{outcome='refused'}": totals["refused"]["stamp_mismatch"],
        "lmcache_qserver_copy_bytes_total": totals["copied_bytes"],
        "sum(lmcache_qserver_pool_bytes)": 64 << 20,
        "max(resets(lmcache_mp_store_chunks_total[1m]))": 0,
    }.items():
        wait_until(partial(_is, prometheus, query, expected), f"{query} is {expected}", 10)
    assert totals["refused"]["stamp_mismatch"] > 0


def _is(prometheus: Prometheus, query: str, expected: float) -> bool:
    return prometheus.value(query) == expected


def check_questions(prometheus: Prometheus) -> None:
    """Every expression of the alerts and the dashboard is one that Prometheus understands."""
    for expression in expressions():
        prometheus.ask("query", query=expression.replace("$__rate_interval", "1m"))
    alerts = prometheus.ask("rules")["groups"][0]["rules"]
    assert len(alerts) == len(re.findall("- alert:", ALERTS.read_text()))
    firing = {one["labels"]["alertname"] for one in prometheus.ask("alerts")["alerts"]}
    assert not firing & {"QServerDown", "QServerNotReady", "QServerCopyHangs"}


def check_scrapes(prometheus: Prometheus) -> None:
    """No scrape failed, and none was complained about."""
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.value("min_over_time(up[1m])") == 1
    assert prometheus.value("changes(scrape_samples_scraped[1m])") == 0, "no series came later"
    types = {one["metric"]: one["type"] for one in prometheus.ask("targets/metadata")}
    assert types["lmcache_mp_store_seconds"] == "histogram"
    assert types["lmcache_qserver_pool_bytes"] == "gauge"
    assert prometheus.complaints() == []
