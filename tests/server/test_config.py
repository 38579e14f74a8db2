from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from lmcache_qserver.config import (
    GIB,
    MIB,
    Config,
    ConfigError,
    configuration_page,
    default_lifeline,
    default_text,
    parse_field,
    parse_size,
)

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_documentation_is_up_to_date() -> None:
    assert PAGE.read_text() == configuration_page(), (
        "run: python -m lmcache_qserver.config > docs/configuration.md"
    )


def test_how_long_silence_leases_and_stopping_may_last() -> None:
    """What operators and LMCache's users count on."""
    config = Config()
    assert (config.reap_timeout_s, config.registration_grace_s) == (120.0, 3600.0)
    assert (config.lease_timeout_s, config.eviction) == (60.0, "lru")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1073741824", GIB),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        ("512 MiB", 512 * MIB),
        ("1.5g", 3 * GIB // 2),
        ("4GB", 4 * 10**9),
        ("64k", 65536),
        ("7B", 7),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 XB", "4GiB4", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="4GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    "item", [item for item in fields(Config) if default_text(item)], ids=lambda item: item.name
)
def test_every_default_reads_back(item: object) -> None:
    assert parse_field(item, default_text(item)) == item.default  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("tcp://127.0.0.1:5555", "tcp://127.0.0.1:5555"),
        ("tcp://localhost:0", "tcp://127.0.0.1:*"),
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
        ("tcp://[::1]:5555", "tcp://[::1]:5555"),
        ("ipc:///run/q.ipc", "ipc:///run/q.ipc"),
    ],
)
def test_urls(url: str, endpoint: str) -> None:
    assert Config(url=url).zmq_endpoint == endpoint


@pytest.mark.parametrize("url", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.1.2.3:5555"])
def test_a_url_beyond_loopback_needs_a_word(url: str) -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        Config(url=url)
    assert Config(url=url, allow_insecure_tcp=True).zmq_endpoint == url


@pytest.mark.parametrize(
    "setting",
    [
        {"url": "http://127.0.0.1:5555"},
        {"url": "tcp://127.0.0.1"},
        {"url": "tcp://127.0.0.1:70000"},
        {"url": "tcp://some.host:5555"},
        {"url": "ipc://relative"},
        {"http_port": -1},
        {"http_port": 65536},
        {"pool_bytes": 1},
        {"chunk_size": 0},
        {"eviction": "fifo"},
        {"log_format": "xml"},
        {"reap_timeout_s": -1.0},
        {"copy_timeout_s": 0.0},
        {"lease_timeout_s": float("nan")},
        {"max_message_bytes": 0},
        {"allow_uid": (-1,)},
    ],
    ids=str,
)
def test_bad_values_name_the_setting(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(setting))}: "):
        Config(**setting)  # type: ignore[arg-type]


def test_where_the_lifeline_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/lmcache-qserver:/run/other")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    url = "tcp://127.0.0.1:5555"
    assert default_lifeline(url) == Path("/run/lmcache-qserver/lifeline.sock")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    assert default_lifeline(url) == Path("/run/user/7/lmcache-qserver/5555.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_lifeline(url).parent.name.startswith("lmcache-qserver-")
    assert default_lifeline("ipc:///run/q.ipc").name == "q.ipc.sock"
