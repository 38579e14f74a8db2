"""The systemd unit, judged by systemd itself.

The binary that it names exists on an installed host only, so a copy runs another one in its place.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "lmcache-qserver.service"
START = "ExecStart=/opt/lmcache-qserver/bin/lmcache-qserver start\n"

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def unit_text() -> str:
    text = UNIT.read_text()
    assert START in text
    return text.replace(START, f"ExecStart={shutil.which('true')} start\n")


def analyze(folder: Path, text: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on a unit with this text."""
    copy = folder / UNIT.name
    copy.write_text(text)
    return subprocess.run(
        ["systemd-analyze", *command, str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "SYSTEMD_COLORS": "0"},
    )


def complaints(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What was said about our unit; other units of the machine are not ours to judge."""
    return [line for line in result.stderr.splitlines() if UNIT.name in line]


def test_systemd_accepts_the_unit(tmp_path: Path, unit_text: str) -> None:
    result = analyze(tmp_path, unit_text, "verify", "--man=no")

    assert complaints(result) == []
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param("NoNewPrivileges=yes", "NoNewPrivilege=yes", id="unknown setting"),
        pytest.param("ProtectSystem=strict", "ProtectSystem=very", id="bad value"),
        pytest.param("LimitMEMLOCK=infinity", "LimitMEMLOCK=much", id="bad limit"),
    ],
)
def test_a_mistake_in_it_would_be_seen(
    tmp_path: Path, unit_text: str, right: str, wrong: str
) -> None:
    assert right in unit_text

    assert complaints(analyze(tmp_path, unit_text.replace(right, wrong), "verify", "--man=no"))


def test_it_stays_closed_down(tmp_path: Path, unit_text: str) -> None:
    """Exposure is 0 (sealed) to 10 (open); the threshold is in tenths."""
    result = analyze(
        tmp_path, unit_text, "security", "--offline=true", "--threshold=25", "--no-pager"
    )

    assert result.returncode == 0, result.stdout + result.stderr
