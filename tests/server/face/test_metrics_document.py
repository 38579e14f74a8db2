"""docs/metrics.md, the alerts and the dashboard speak of metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from docs.generate_metrics import PAGE, exposed_name, families, labels, updated
from lmcache_qserver.testing.daemon import running_daemon

DEPLOY = Path(__file__).parents[3] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboard.json"
NAME = re.compile(r"\b(?:lmcache|process)_\w+")
MATCHER = re.compile(r"(\w+)\{([^}]*)\}")


def expressions() -> list[str]:
    """Every PromQL expression in deploy/."""
    alerts = re.findall(r"^ *expr: (.*)$", ALERTS.read_text(), re.MULTILINE)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return alerts + [target["expr"] for panel in panels for target in panel.get("targets", ())]


def known() -> dict[str, dict[str, list[str]]]:
    """Labels of every name that a query may use."""
    found: dict[str, dict[str, list[str]]] = {}
    for family in families():
        found[exposed_name(family)] = labels(family)
        for sample in family.samples:
            found[sample.name] = labels(family)
    return found


def test_the_table_is_up_to_date() -> None:
    assert updated(PAGE.read_text()) == PAGE.read_text(), "run: python docs/generate_metrics.py"


def test_the_table_lists_what_a_daemon_serves() -> None:
    with running_daemon() as daemon:
        served = set(re.findall(r"^# TYPE (\w+) ", daemon.get("/metrics"), re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert served == listed


def test_every_metric_of_an_alert_or_a_panel_exists() -> None:
    names = known()
    used = [(one, name) for one in expressions() for name in NAME.findall(one)]
    assert len(used) > 15
    assert [(one, name) for one, name in used if name not in names] == []


@pytest.mark.parametrize("expression", expressions())
def test_every_label_value_that_is_asked_for_exists(expression: str) -> None:
    names = known()
    for name, matchers in MATCHER.findall(expression):
        for label, value in re.findall(r'(\w+)!?=~?"([^"]*)"', matchers):
            if label in ("job", "instance"):
                continue
            assert set(value.split("|")) <= set(names[name][label]), (name, label, value)


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    assert dashboard["title"]
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["id"] is None, "an import gives it one"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert set(panel["gridPos"]) == {"h", "w", "x", "y"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource"]
