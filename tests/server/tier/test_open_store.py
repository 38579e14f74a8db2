"""URLs, and that nothing is loaded before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_qserver.tier import Refused, open_store

SCRIPT = """
import sys
sys.path[:0] = {path!r}
import asyncio
import lmcache_qserver.cli, lmcache_qserver.daemon, lmcache_qserver.tier
from lmcache_qserver.tier import open_store
asyncio.run(asyncio.wait_for(open_store("file://" + sys.argv[1]), 30))
print([name for name in sys.modules if name.partition(".")[0] in ("obstore", "safetensors")])
"""


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/var/lib/x",
        "file://",
        "file:///",
        "file://host/path",
        "file:relative",
        "http://bucket/x",
        "s3://",
        "gs:///prefix",
        "s3://user:secret@bucket/x",
        "s3://bucket/x?access_key_id=1",
        "s3://bucket/x#y",
    ],
)
async def test_what_is_no_url_of_a_store(url: str) -> None:
    with pytest.raises(ValueError) as told:  # noqa: PT011 - each has a text of its own
        await open_store(url)
    assert "secret" not in str(told.value)


async def test_direct_is_for_files() -> None:
    with pytest.raises(ValueError, match="file:// only"):
        await open_store("memory://", direct=True)


async def test_a_path_may_have_any_characters(tmp_path: Path) -> None:
    store = await open_store(f"file://{tmp_path}/a%20b%23c")
    assert (tmp_path / "a b#c").is_dir()
    await store.close(1.0)


def test_the_daemon_and_a_store_of_files_load_no_obstore(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(path=sys.path), str(tmp_path / "l2")],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"


async def test_without_obstore_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "lmcache_qserver.tier.objects", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(Refused, match=r"pip install 'lmcache-qserver\[l2\]'"):
        await open_store("s3://bucket/x")


@pytest.mark.parametrize("url", ["gs://bucket/x", "az://container/x"])
async def test_other_providers_can_be_built(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built only: no such server is here to speak to."""
    from lmcache_qserver.tier.objects import _build

    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    assert _build(url, 5.0) is not None
