"""/status serves what docs/status.md and its schema say, and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec

from docs.generate_status import PAGE, SCHEMA, schema, structures, updated
from lmcache_qprotocol.messages import RequestCoverage, WorkerReport
from lmcache_qprotocol.reasons import LossReason
from lmcache_qserver.status_report import STATUS_VERSION, StatusReport
from lmcache_qserver.testing.bare_client import BareClient, BareLifeline
from lmcache_qserver.testing.daemon import RunningDaemon, running_daemon, wait_until
from lmcache_qserver.testing.sim_worker import SimDeviceWorker
from tests.server.face.wire_session import TOKENS, wire_session

FREE_FORM = frozenset({"layout"})
"""Maps whose keys are another document's."""


def documented() -> dict[str, set[str]]:
    """Fields by structure, as the page lists them; "" is the whole."""
    found = {}
    for part in re.split(r"^(?=\*\*)", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = re.match(r"\*\*(?:`(\w+)`|the whole)\*\*", part)
        if title is not None:
            found[title[1] or ""] = set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE))
    return found


@contextlib.contextmanager
def ring_on_a_device(daemon: RunningDaemon) -> Iterator[None]:
    """So that a device has a process."""
    with BareClient(daemon.url) as client, BareLifeline(daemon.lifeline) as lifeline:
        _, pool_fd = lifeline.attach(client.hello().session)
        os.close(pool_fd)
        worker = SimDeviceWorker(chunk_size=TOKENS)
        worker.register(client, "on a device")
        yield
        worker.close()


def busy_status() -> Any:
    """A status in which nothing is empty."""
    with (
        running_daemon(chunk_size=TOKENS, devices="sim", l2="memory://") as daemon,
        wire_session(daemon) as session,
        ring_on_a_device(daemon),
    ):
        session.store(range(TOKENS))
        session.retrieve(range(TOKENS))
        session.store(range(1, 1 + TOKENS), spoil=True)
        one = RequestCoverage(
            request_id="r", computed=1, captured=0, lost={LossReason.RING_FULL: 1}
        )
        lost = {LossReason.RING_FULL: 1}
        session.report(WorkerReport(computed=1, captured=0, lost=lost, pending=0, recent=(one,)))
        wait_until(lambda: daemon.status()["totals"]["finished_stores"] == 2, "all are told")
        return daemon.status()


def test_the_page_and_the_schema_are_up_to_date() -> None:
    command = "run: python docs/generate_status.py"
    assert updated(PAGE.read_text()) == PAGE.read_text(), command
    assert SCHEMA.read_text() == schema(), command


def test_every_field_that_is_served_is_documented_and_vice_versa() -> None:
    served: dict[str, set[str]] = {}
    walk(busy_status(), StatusReport, served)
    assert served == documented()
    text = PAGE.read_text()
    assert f"of this page's meaning: {STATUS_VERSION}" in text
    assert "Fields are added without a change of it" in " ".join(text.split())


def walk(value: Any, kind: Any, served: dict[str, set[str]]) -> None:
    """Collect the keys of every object that is served, under the structure that it should be."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        served.setdefault("" if kind is StatusReport else kind.__name__, set()).update(value)
        for name, inner in value.items():
            if name not in FREE_FORM:
                walk(inner, hints.get(name), served)
        return
    parts: tuple[Any, ...] = getattr(kind, "__args__", ())
    if type(None) in parts:  # a structure, or nothing
        walk(value, parts[0], served)
        return
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for inner in values:
        walk(inner, parts[-1], served)


def test_a_live_answer_has_the_types_that_are_documented() -> None:
    status = busy_status()
    report = msgspec.convert(status, StatusReport, strict=True)
    assert msgspec.to_builtins(report) == status
    assert {one.__name__ for one in structures(StatusReport)} == {
        name or "StatusReport" for name in documented()
    }
    assert set(json.loads(SCHEMA.read_text())["$defs"]) == {
        one.__name__ for one in structures(StatusReport)
    }
