"""The command line: `lmcache-qserver start`, `status` and `verify`; `l2` is in l2_cli.py."""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import click

from lmcache_qserver import installed_version
from lmcache_qserver.config import ENV_PREFIX, Config, ConfigError, default_text, parse_field
from lmcache_qserver.l2_cli import l2

DEFAULT_HTTP_URL = f"http://{Config.http_host}:{Config.http_port}"


if TYPE_CHECKING:
    from lmcache_qserver.device.fork_server import ForkServer
    from lmcache_qserver.pool import PoolMemory

    _ParamType = click.ParamType[Any, Any]
else:
    _ParamType = click.ParamType  # generic from click 8.4 on


class _FieldType(_ParamType):
    """A field of `Config` as click sees it."""

    def __init__(self, item: Field[Any]) -> None:
        self._item = item
        self.name = item.metadata["unit"]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return parse_field(self._item, value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


def _option(item: Field[Any]) -> click.Option:
    name = item.name.replace("_", "-")
    is_flag = isinstance(item.default, bool)
    default = default_text(item)
    return click.Option(
        [f"--{name}/--no-{name}" if is_flag else f"--{name}"],
        default=item.default,
        envvar=ENV_PREFIX + item.name.upper(),
        help=item.metadata["help"],
        show_default=default or False,
        show_envvar=True,
        type=None if is_flag else _FieldType(item),
    )


def _start(**values: Any) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    try:
        config = Config(**values)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    # Late: --help and status need neither numpy nor sockets. The pool first, see there.
    from lmcache_qserver.pool.populating import begin

    fork_servers: list[ForkServer] = []
    populating = begin(
        config.pool_bytes,
        lambda memory: fork_servers.extend(_fork_servers(config.device_kind, memory)),
    )
    from lmcache_qserver.daemon import run

    sys.exit(run(config, populating, *fork_servers))


def _fork_servers(device_kind: str, memory: PoolMemory) -> list[ForkServer]:
    """The one that starts processes of devices, where there are devices."""
    if not device_kind:
        return []
    from lmcache_qserver.device.fork_server import ForkServer

    return [ForkServer(memory.array)]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(installed_version(), prog_name="lmcache-qserver")
def cli() -> None:
    """Keeps the attention queries of vLLM workers, and hands them out again."""


cli.add_command(
    click.Command(
        "start",
        callback=_start,
        params=[_option(item) for item in fields(Config)],
        help=_start.__doc__,
    )
)


cli.add_command(l2)


@cli.command()
@click.option(
    "--http-url",
    default=DEFAULT_HTTP_URL,
    envvar=ENV_PREFIX + "HTTP_URL",
    show_default=True,
    show_envvar=True,
    help="Where the daemon serves /status.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what /status says, as it is.")
def status(http_url: str, as_json: bool) -> None:
    """Show what a running daemon holds, who is connected, and what was not stored and why."""
    from lmcache_qserver.face.status_table import StatusUnavailable, fetch, table

    try:
        text, report = fetch(http_url)
    except StatusUnavailable as error:
        raise click.ClickException(str(error)) from None
    click.echo(text.rstrip() if as_json else table(report))


@cli.command()
@click.option(
    "--url",
    default=Config.url,
    envvar=ENV_PREFIX + "URL",
    show_default=True,
    show_envvar=True,
    help="Where the daemon serves workers and SDKs.",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=300.0,
    show_default=True,
    type=click.FloatRange(0.1, 1e6),
    help="Seconds to wait; a daemon hashes some gigabytes in one.",
)
def verify(url: str, timeout_s: float) -> None:
    """Hash all that a running daemon stores, and drop what has changed in memory.

    Exits with 1 if anything had.
    """
    from lmcache_qserver.face.verify import VerifyFailed, in_words
    from lmcache_qserver.face.verify import verify as ask

    try:
        reply = ask(url, timeout_s)
    except VerifyFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(in_words(reply))
    sys.exit(1 if reply.corrupt else 0)
