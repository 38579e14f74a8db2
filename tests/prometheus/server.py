"""A real Prometheus that scrapes one target, for a test; what it stores goes with the test."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_qserver.testing.daemon import wait_until

CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
rule_files: [{rules}]
scrape_configs:
  - job_name: lmcache-qserver
    static_configs: [{{targets: ["{target}"]}}]
"""


@dataclass
class Prometheus:
    """One that is ready."""

    url: str
    log_path: Path

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its HTTP API; AssertionError when it refuses the question."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.loads(reply.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from None

    def value(self, query: str) -> float | None:
        """The value of a query with one result; None when there is none."""
        results = self.ask("query", query=query)["result"]
        assert len(results) <= 1, f"{query} has {len(results)} results"
        return float(results[0]["value"][1]) if results else None

    def complaints(self) -> list[str]:
        """What it has logged above level info."""
        lines = self.log_path.read_text().splitlines()
        return [line for line in lines if re.search(r"level=(warn|error)", line, re.IGNORECASE)]


@contextlib.contextmanager
def running_prometheus(folder: Path, target_url: str, rules: Path) -> Iterator[Prometheus]:
    """Scrapes `target_url`/metrics every second.

    Args:
        folder: empty; its configuration, data and log go there.
        rules: a file of alerts.
    """
    target = target_url.removeprefix("http://")
    config, log_path = folder / "prometheus.yml", folder / "log"
    config.write_text(CONFIG.format(target=target, rules=json.dumps(str(rules))))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (
        log_path.open("wb") as output,
        subprocess.Popen(argv, stdout=output, stderr=output) as process,
    ):
        try:
            wait_until(lambda: _is_ready(address) or process.poll() is not None, "it is ready")
            assert process.poll() is None, log_path.read_text()
            yield Prometheus(f"http://{address}", log_path)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
