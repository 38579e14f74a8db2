"""Configuration: one typed struct. Defaults, units and help are declared here and nowhere else.

The command line (cli.py), the environment (`LMCACHE_QSERVER_<NAME>`) and docs/configuration.md all come from the fields
of `Config`. After a change of a field: `python -m lmcache_qserver.config > docs/configuration.md`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

ENV_PREFIX = "LMCACHE_QSERVER_"
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
EVICTION = ("lru", "none")
CHECKSUM = ("deferred", "inline")
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEVICES = ("auto", "cuda", "off", "sim")
NVIDIA_DRIVER = Path("/dev/nvidiactl")

_T = TypeVar("_T")


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what it may be."""


# --- from text to values ------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes: "1073741824", "4GiB", "512 MiB", "1.5g" (powers of 1024), "4GB" (powers of 1000)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 4GiB, 512MiB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_flag(text: str) -> bool:
    """true/false, yes/no, on/off, 1/0."""
    value = text.strip().lower()
    if value not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(f"{text!r} is neither true nor false")
    return value in ("1", "true", "yes", "on")


def parse_ids(text: str) -> tuple[int, ...]:
    """Numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of numbers; write for example 1000,1001"
        ) from None


def option(default: _T, parse: Callable[[str], _T], unit: str, text: str) -> _T:
    """A field of `Config`.

    Args:
        parse: text to value; raises ValueError.
        unit: what the value counts, for people.
        text: one sentence of help.
    """
    value: _T = field(default=default, metadata={"parse": parse, "unit": unit, "help": text})
    return value


# --- the struct ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that can be set.

    Raises:
        ConfigError: a value is outside its range, or two values do not go together.
    """

    url: str = option(
        "tcp://127.0.0.1:5555",
        str,
        "address",
        "Where workers and SDKs connect: tcp://IP:PORT (port 0: any free one) or ipc:///PATH.",
    )
    http_host: str = option(
        "127.0.0.1", str, "address", "Interface of /status, /metrics and the probes."
    )
    http_port: int = option(
        8080, int, "port", "Port of /status, /metrics and the probes; 0: any free one."
    )
    lifeline: str = option(
        "",
        str,
        "path",
        "Unix socket that passes memory by descriptor; empty: lifeline.sock in $RUNTIME_DIRECTORY, else "
        "lmcache-qserver/PORT.sock in $XDG_RUNTIME_DIR, else /tmp/lmcache-qserver-UID/PORT.sock.",
    )
    pool_bytes: int = option(
        GIB, parse_size, "bytes", "Host memory for stored chunks (L1), for example 4GiB."
    )
    chunk_size: int = option(
        256, int, "tokens", "Tokens per chunk; workers and SDKs take it from here."
    )
    l2: str = option(
        "",
        str,
        "url",
        "Where stored chunks persist: file:///PATH, s3://BUCKET/PREFIX, gs://..., az://..., memory://, or none; empty: "
        "file:// l2 in $STATE_DIRECTORY, else $XDG_STATE_HOME/lmcache-qserver, else ~/.local/state/lmcache-qserver.",
    )
    l2_max_bytes: int = option(
        32 * GIB,
        parse_size,
        "bytes",
        "What a persistent tier of files may hold; beyond, what was unused longest goes. 0: no limit. Buckets have "
        "lifecycle rules.",
    )
    l2_timeout_s: float = option(
        30.0, float, "seconds", "Longest time until the persistent tier has answered a request."
    )
    ttl_s: float = option(
        0.0, float, "seconds", "Age at which a stored chunk goes, in memory and on disk; 0: never."
    )
    eviction: str = option(
        "lru",
        str,
        ", ".join(EVICTION),
        "What a full pool does: evict what was unused longest, or refuse.",
    )
    reap_timeout_s: float = option(
        120.0,
        float,
        "seconds",
        "A worker that has pinged before and then not for so long is released; 0: never.",
    )
    registration_grace_s: float = option(
        3600.0, float, "seconds", "The same for a worker that has never pinged."
    )
    copy_timeout_s: float = option(30.0, float, "seconds", "Longest time that one store may copy.")
    copy_threads: int = option(
        2,
        int,
        "threads",
        "Threads that may share one large copy (4 MiB or more); never more than there are processors.",
    )
    checksum: str = option(
        "deferred",
        str,
        ", ".join(CHECKSUM),
        "When an object's checksum is made: in a pause behind its store, or before the store is answered.",
    )
    lease_timeout_s: float = option(
        60.0, float, "seconds", "A reader's lease ends by itself after this time."
    )
    allow_inline: bool = option(
        False,
        parse_flag,
        "flag",
        "Let clients that can't reach the lifeline (other containers, other hosts) store and read through the url, "
        "whoever they are; off: only the lifeline's users, who are checked.",
    )
    upload_timeout_s: float = option(
        60.0,
        float,
        "seconds",
        "A store that comes through the url and is not complete after this time is given up.",
    )
    max_message_bytes: int = option(
        16 * MIB, parse_size, "bytes", "Largest message that a client may send."
    )
    allow_uid: tuple[int, ...] = option(
        (),
        parse_ids,
        "user ids",
        "Users besides the daemon's own and root that may use the lifeline, between commas.",
    )
    allow_insecure_tcp: bool = option(
        False,
        parse_flag,
        "flag",
        "Accept a url beyond loopback although nothing on it is authenticated.",
    )
    devices: str = option(
        "auto",
        str,
        ", ".join(DEVICES),
        "Devices whose rings are copied; auto: cuda where an NVIDIA driver is, else off; sim: simulated, for tests.",
    )
    log_format: str = option(
        "text", str, ", ".join(LOG_FORMATS), "Form of log lines on standard error."
    )
    log_level: str = option(
        "info",
        str,
        ", ".join(LOG_LEVELS),
        "Lines below this level are left out; debug has one for every store.",
    )
    ready_file: str = option(
        "",
        str,
        "path",
        "File that is there while the daemon is ready: JSON of pid, url, http_url, lifeline, boot_id.",
    )
    drain_timeout_s: float = option(
        10.0, float, "seconds", "How long a stopping daemon waits for stores that are under way."
    )

    def __post_init__(self) -> None:
        _check_range("http_port", self.http_port, 0, 65535)
        _check_range("pool_bytes", self.pool_bytes, MIB, 1 << 50)
        _check_range("chunk_size", self.chunk_size, 1, 1 << 20)
        _check_range("copy_threads", self.copy_threads, 1, 64)
        _check_range("max_message_bytes", self.max_message_bytes, 64 * KIB, GIB)
        _check_range("l2_max_bytes", self.l2_max_bytes, 0, 1 << 60)
        for name in ("reap_timeout_s", "registration_grace_s", "drain_timeout_s", "ttl_s"):
            _check_range(name, getattr(self, name), 0.0, 1e9)
        for name in ("copy_timeout_s", "lease_timeout_s", "upload_timeout_s", "l2_timeout_s"):
            _check_range(name, getattr(self, name), 0.001, 1e9)
        if self.allow_uid and min(self.allow_uid) < 0:
            raise ConfigError("allow_uid: user ids are not negative")
        _check_choice("eviction", self.eviction, EVICTION)
        _check_choice("checksum", self.checksum, CHECKSUM)
        _check_choice("devices", self.devices, DEVICES)
        _check_choice("log_format", self.log_format, LOG_FORMATS)
        _check_choice("log_level", self.log_level, LOG_LEVELS)
        self._check_url()
        self._check_l2()

    def _check_url(self) -> None:
        if self.url.startswith("ipc://"):
            if not self.url.startswith("ipc:///"):
                raise ConfigError(
                    f"url: {self.url!r} needs an absolute path, as in ipc:///run/lmcache-qserver/q.ipc"
                )
            return
        host, _ = split_tcp(self.url)
        if not _is_loopback(host) and not self.allow_insecure_tcp:
            raise ConfigError(
                f"url: {self.url} is reachable from other hosts, and keys (CURVE) are not there yet: anybody there "
                "could read and write. Use 127.0.0.1, or say --allow-insecure-tcp if the network itself is closed"
            )

    def _check_l2(self) -> None:
        if self.l2 in ("", "none"):
            return
        # Here: the command line imports this file, and --help needs nothing of the tier.
        from lmcache_qserver.tier.url import check_url

        try:
            check_url(self.l2)
        except ValueError as error:
            raise ConfigError(f"l2: {error}") from None

    @property
    def l2_url(self) -> str:
        """Where chunks persist; empty for nowhere."""
        if self.l2 == "none":
            return ""
        from lmcache_qserver.tier.default_url import default_l2_url  # as above

        return self.l2 or default_l2_url()

    @property
    def device_kind(self) -> str:
        """Kind of the rings on devices: "cuda" or "sim"; empty where there are none."""
        if self.devices == "auto":
            return "cuda" if NVIDIA_DRIVER.exists() else ""
        return "" if self.devices == "off" else self.devices

    @property
    def zmq_endpoint(self) -> str:
        """The url in ZeroMQ's own words."""
        if self.url.startswith("ipc://"):
            return self.url
        host, port = split_tcp(self.url)
        shown = f"[{host}]" if ":" in host else host
        return f"tcp://{shown}:{port or '*'}"


_TCP = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]+)\]|([^\[\]:/]+)):(\d{1,5}|\*)")


def split_tcp(url: str) -> tuple[str, int]:
    """(host, port) of a tcp url; "localhost" becomes 127.0.0.1, and port `*` becomes 0.

    Raises:
        ConfigError: not of the form tcp://IP:PORT.
    """
    match = _TCP.fullmatch(url)
    if match is None:
        raise ConfigError(f"url: {url!r} is not of the form tcp://IP:PORT or ipc:///PATH")
    host = match[1] or match[2]
    port = 0 if match[3] == "*" else int(match[3])
    if port > 65535:
        raise ConfigError(f"url: port {port} is above 65535")
    if host == "localhost":
        host = "127.0.0.1"
    if host != "*":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"url: {host!r} is not an IP address of this host") from None
    return host, port


def _is_loopback(host: str) -> bool:
    return host != "*" and ipaddress.ip_address(host).is_loopback


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name}: {value} is outside [{low}, {high}]")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")


def default_lifeline(bound_url: str) -> Path:
    """Where the lifeline's socket lies when nothing is set.

    Args:
        bound_url: the url with its real port: two daemons of one user must not share a path.
    """
    if runtime := os.environ.get("RUNTIME_DIRECTORY"):
        return Path(runtime.split(":")[0]) / "lifeline.sock"
    name = (
        bound_url.rpartition(":")[2] if bound_url.startswith("tcp://") else Path(bound_url[6:]).name
    )
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "lmcache-qserver" / f"{name}.sock"
    return Path(f"/tmp/lmcache-qserver-{os.getuid()}") / f"{name}.sock"


# --- what is made from it -----------------------------------------------------------------------------------------


def parse_field(item: Field[Any], text: str) -> Any:
    """The value of one field from text.

    Raises:
        ConfigError: the text is no such value.
    """
    try:
        return item.metadata["parse"](text)
    except ValueError as error:
        raise ConfigError(f"{item.name}: {error}") from None


def default_text(item: Field[Any]) -> str:
    """A field's default, as one would write it."""
    value = item.default
    assert value is not MISSING
    if item.metadata["parse"] is parse_size:
        return next(
            f"{value // scale}{unit}"
            for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB), ("", 1))
            if not value % scale
        )
    if isinstance(value, bool):
        return str(value).lower()
    return (
        ",".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def configuration_page() -> str:
    """docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Made by `python -m lmcache_qserver.config`; edit the fields of `Config` there. -->",
        "",
        "Settings of `lmcache-qserver start`. The command line goes before the environment, the environment before the",
        "default. Sizes are written as `4GiB`, `512MiB` or plain bytes.",
        "",
        "| option | environment | unit | default | meaning |",
        "|---|---|---|---|---|",
    ]
    for item in fields(Config):
        default = default_text(item)
        lines.append(
            f"| `--{item.name.replace('_', '-')}` | `{ENV_PREFIX}{item.name.upper()}` | {item.metadata['unit']} "
            f"| {f'`{default}`' if default else ''} | {item.metadata['help']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(configuration_page(), end="")
