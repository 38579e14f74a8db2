"""Where objects lie when nothing is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_qserver.tier import Refused, open_store
from lmcache_qserver.tier.default_url import default_l2_url


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, "file:///home/me/.local/state/lmcache-qserver/l2"),
        ({"XDG_STATE_HOME": ""}, "file:///home/me/.local/state/lmcache-qserver/l2"),
        ({"XDG_STATE_HOME": "relative"}, "file:///home/me/.local/state/lmcache-qserver/l2"),
        ({"XDG_STATE_HOME": "/state"}, "file:///state/lmcache-qserver/l2"),
        ({"STATE_DIRECTORY": "/var/lib/x", "XDG_STATE_HOME": "/state"}, "file:///var/lib/x/l2"),
        ({"STATE_DIRECTORY": "/var/lib/x:/var/lib/y"}, "file:///var/lib/x/l2"),
        ({"STATE_DIRECTORY": "/a b#c"}, "file:///a%20b%23c/l2"),
    ],
)
def test_the_state_folder_of_the_service_or_of_the_user(
    environment: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(monkeypatch, {"HOME": "/home/me", **environment})
    assert default_l2_url() == url


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(_cls: object) -> Path:
        raise RuntimeError

    _set(monkeypatch, {})
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    with pytest.raises(Refused, match="--l2"):
        default_l2_url()


async def test_a_store_opens_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"STATE_DIRECTORY": f"{tmp_path}/a b"})
    (tmp_path / "a b").mkdir()
    store = await open_store(default_l2_url())
    assert (tmp_path / "a b" / "l2").is_dir()
    await store.close(1.0)


def _set(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name in ("STATE_DIRECTORY", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
