"""The command line: `lmcache-qserver start`, `status` and `verify`; `l2` is in l2_cli.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmcache_qserver import installed_version
from lmcache_qserver.config import ENV_PREFIX, Config, ConfigError, default_text, parse_field
from lmcache_qserver.l2_cli import l2

_Command = TypeVar("_Command", bound=Callable[..., Any])

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


def _ask_options(timeout_s: float, what: str) -> Callable[[_Command], _Command]:
    """--url and --timeout of a command that asks a running daemon."""

    def add(command: _Command) -> _Command:
        command = click.option(
            "--timeout",
            "timeout_s",
            default=timeout_s,
            show_default=True,
            type=click.FloatRange(0.1, 1e6),
            help=f"Seconds to wait{what}.",
        )(command)
        return click.option(
            "--url",
            default=Config.url,
            envvar=ENV_PREFIX + "URL",
            show_default=True,
            show_envvar=True,
            help="Where the daemon serves workers and SDKs.",
        )(command)

    return add


def _ask(
    url: str, operation: str, payloads: Sequence[Any], timeout_s: float, **options: bool
) -> Any:
    from lmcache_qprotocol.operations import BY_NAME
    from lmcache_qserver.face.asking import AskFailed, ask_daemon

    try:
        return ask_daemon(url, BY_NAME[operation], payloads, timeout_s, **options)
    except AskFailed as error:
        raise click.ClickException(str(error)) from None


@cli.command()
@_ask_options(300.0, "; a daemon hashes some gigabytes in one")
def verify(url: str, timeout_s: float) -> None:
    """Hash all that a running daemon stores in memory, and drop what has changed.

    Exits with 1 if anything had. `lmcache-qserver l2 verify` does the same for the persistent tier.
    """
    from lmcache_qserver.face.verify import in_words

    reply = _ask(url, "verify_q", (), timeout_s)
    click.echo(in_words(reply))
    sys.exit(1 if reply.corrupt else 0)


@cli.command()
@_ask_options(60.0, " until all is written")
def flush(url: str, timeout_s: float) -> None:
    """Wait until everything that a running daemon stores is in its persistent tier; tells what was lost before.

    Exits with 1 if it is not.
    """
    reply = _ask(url, "flush_q", (int(timeout_s * 1000),), timeout_s + 5.0)
    if reply.lost:
        click.echo(
            f"{reply.lost} objects since the daemon's start left memory before they were persisted: they are gone "
            "(lmcache-qserver status says why)",
            err=True,
        )
    if reply.persisted:
        click.echo("everything that is stored is persisted")
        return
    raise click.ClickException(f"{reply.waiting} objects are not persisted: {reply.message}")


@cli.command()
@click.option(
    "--model",
    required=True,
    help="As the engine calls it: all its features; MODEL##query: that one.",
)
@click.option("--salt", help="Only what has this cache salt.")
@click.option("--no-salt", is_flag=True, help="Only what has no salt.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@_ask_options(300.0, "")
def purge(
    url: str, timeout_s: float, model: str, salt: str | None, no_salt: bool, yes: bool
) -> None:
    """Delete what a running daemon stores of a model, or of one salt of it, in memory and in the persistent tier.

    Other daemons on the same persistent tier keep what they have in memory: purge each.
    """
    if salt is not None and no_salt:
        raise click.UsageError("--salt and --no-salt exclude each other")
    of = "" if salt is None and not no_salt else " without a salt" if no_salt else " of that salt"
    if not yes:
        click.confirm(f"Delete everything of {model}{of} in {url}?", abort=True)
    payloads = (model, "" if no_salt else salt)
    reply = _ask(url, "purge_q", payloads, timeout_s, attach=True)
    click.echo(
        f"{reply.dropped} objects dropped from memory, {reply.deleted} deleted in the persistent tier "
        f"({reply.deleted_bytes / 1e9:.2f} GB)"
    )
    if reply.message:
        raise click.ClickException(reply.message)
