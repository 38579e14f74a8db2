"""The command line of a persistent store: `lmcache-qserver l2 ls|du|verify|gc|purge`, without a daemon.

Exit codes: 0 fine; 1 something is wrong with what is stored, or a purge was not confirmed; 2 it could not be done.
With --json a line of JSON for each thing told, with its `kind`; the last, of kind `total`, sums up.

What the commands do is in upkeep/, imported late so that --help stays light.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lmcache_qserver.config import ENV_PREFIX, parse_size
from lmcache_qserver.face.amounts import parse_duration, plain

if TYPE_CHECKING:
    from lmcache_qserver.tier import ChunkStore
    from lmcache_qserver.upkeep.selection import Selection

CLOSE_TIMEOUT_S = 5.0
FINE, WRONG = 0, 1

_Command = TypeVar("_Command", bound=Callable[..., Any])


class L2Failed(click.ClickException):
    """It could not be done; the message says why."""

    exit_code = 2


# --- options ------------------------------------------------------------------------------------------------------


def _parsed(parse: Callable[[str], Any]) -> Callable[[Any, Any, str | None], Any]:
    def callback(_context: click.Context, _option: click.Parameter, value: str | None) -> Any:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def _store_options(command: _Command) -> _Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Lines of JSON instead of text."),
        click.option(
            "--l2",
            "url",
            envvar=ENV_PREFIX + "L2",
            show_envvar=True,
            help="The store: file:///PATH, s3://BUCKET/PREFIX, ... Default: the daemon's, under the state folder.",
        ),
    ):
        command = option(command)
    return command


def _salt_options(command: _Command) -> _Command:
    for option in (
        click.option("--no-salt", is_flag=True, help="Only what has no salt."),
        click.option(
            "--salt-digest", help="Only what has this salt, by its digest as ls shows it."
        ),
        click.option("--salt", help="Only what has this cache salt."),
    ):
        command = option(command)
    return command


_MODEL_HELP = "This model, all of its features; MODEL##query: that one."


def _selection(
    model: str | None, salt: str | None, salt_digest: str | None, no_salt: bool
) -> Selection:
    from lmcache_qprotocol.keys import salt_digest as digest_of
    from lmcache_qserver.upkeep.selection import Selection

    if (salt is not None) + (salt_digest is not None) + no_salt > 1:
        raise click.UsageError("--salt, --salt-digest and --no-salt exclude each other")
    try:
        if salt is not None:
            salt_digest = digest_of(salt)
        return Selection(model, "" if no_salt else salt_digest)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


# --- running ------------------------------------------------------------------------------------------------------


def _run(
    url: str | None,
    work: Callable[[ChunkStore, str], Coroutine[Any, Any, int]],
    read_only: bool,
) -> None:
    """Open the store, work on it, exit with what the work returns."""
    import asyncio

    from lmcache_qserver.tier import TierError
    from lmcache_qserver.tier.default_url import default_l2_url

    async def run() -> int:
        at = url or default_l2_url()
        store = await _open(at, read_only)
        try:
            return await work(store, at)
        finally:
            await store.close(CLOSE_TIMEOUT_S)

    try:
        code = asyncio.run(run())
    except TierError as error:
        raise L2Failed(plain(str(error))) from None
    sys.exit(code)


async def _open(url: str, read_only: bool) -> ChunkStore:
    from lmcache_qserver.tier import open_store

    if url == "none":
        raise click.UsageError("--l2 is none: there is no store to look after")
    try:
        store = await open_store(url, read_only=True)
        if read_only:
            return store
        # Looked at first, because opening for writing would make a folder that is not there.
        await store.close(CLOSE_TIMEOUT_S)
        return await open_store(url)
    except ValueError as error:
        raise click.UsageError(plain(str(error))) from None


def _tell(as_json: bool, record: dict[str, Any], text: str) -> None:
    click.echo(json.dumps(record) if as_json else text)


# --- commands -----------------------------------------------------------------------------------------------------


@click.group()
def l2() -> None:
    """Look after a persistent store, by its URL; no daemon is needed."""


@l2.command("ls")
@_store_options
@_salt_options
@click.option("--model", help=_MODEL_HELP)
@click.option("--long", "is_long", is_flag=True, help="Read headers, too: rows and tokens of each.")
def ls_command(
    url: str | None,
    as_json: bool,
    model: str | None,
    salt: str | None,
    salt_digest: str | None,
    no_salt: bool,
    is_long: bool,
) -> None:
    """List objects, one a line. Exits with 1 if a header can't be read."""
    selection = _selection(model, salt, salt_digest, no_salt)

    async def work(store: ChunkStore, _url: str) -> int:
        from lmcache_qserver.upkeep import told
        from lmcache_qserver.upkeep.ls import ls

        now, shown, foreign, errors = time.time(), 0, 0, 0
        async for listed in ls(store, selection, is_long):
            errors += bool(listed.error)
            foreign += listed.found.address is None
            if as_json:
                click.echo(json.dumps(told.listed_record(listed)))
            elif listed.found.address is not None:
                if not shown:
                    click.echo(told.listing_line(told.LISTING_HEAD, is_long))
                click.echo(told.listing_line(told.listed_cells(listed, now), is_long))
                shown += 1
        if foreign and not as_json:
            click.echo(f"names that are not ours: {foreign}", err=True)
        return WRONG if errors else FINE

    _run(url, work, read_only=True)


@l2.command("du")
@_store_options
def du_command(url: str | None, as_json: bool) -> None:
    """Sum up by model, layout and rank."""

    async def work(store: ChunkStore, _url: str) -> int:
        from lmcache_qserver.upkeep import told
        from lmcache_qserver.upkeep.usage import usage

        found = await usage(store)
        if as_json:
            for record in told.usage_records(found):
                click.echo(json.dumps(record))
        else:
            click.echo("\n".join(told.usage_lines(found, time.time())))
        return FINE

    _run(url, work, read_only=True)


@l2.command("verify")
@_store_options
@click.option("--model", help=_MODEL_HELP)
@click.option("--quarantine", is_flag=True, help="Put what is corrupt aside.")
def verify_command(url: str | None, as_json: bool, model: str | None, quarantine: bool) -> None:
    """Read every object and prove it. Exits with 1 if anything is wrong."""
    selection = _selection(model, None, None, False)

    async def work(store: ChunkStore, at: str) -> int:
        from lmcache_qserver.upkeep import told
        from lmcache_qserver.upkeep.verify import FINE as FINE_CODES
        from lmcache_qserver.upkeep.verify import WHOLE, verify

        began = time.monotonic()
        counts: Counter[str] = Counter()
        nbytes = 0
        # Two stores: who only reads must not mark everything as used.
        keeper = await _open(at, read_only=False) if quarantine else None
        try:
            async for verdict in verify(store, selection, keeper):
                counts[verdict.code] += 1
                if verdict.code == WHOLE:
                    nbytes += verdict.entry.nbytes
                else:
                    _tell(as_json, told.verdict_record(verdict), told.verdict_line(verdict))
        finally:
            if keeper is not None:
                await keeper.close(CLOSE_TIMEOUT_S)
        seconds = time.monotonic() - began
        total = {"kind": "total", "verdicts": dict(counts), "bytes": nbytes, "seconds": seconds}
        _tell(as_json, total, told.verify_summary(counts, nbytes, seconds))
        return FINE if all(code in FINE_CODES for code in counts) else WRONG

    _run(url, work, read_only=True)


@l2.command("gc")
@_store_options
@click.option(
    "--older-than",
    "older_than_s",
    callback=_parsed(parse_duration),
    metavar="TIME",
    help="Delete what was put longer ago, for example 30d or 12h; in quarantine, too.",
)
@click.option(
    "--max-bytes",
    callback=_parsed(parse_size),
    metavar="SIZE",
    help="Then delete what was unused longest, until no more is left, for example 100GiB.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would go.")
def gc_command(
    url: str | None,
    as_json: bool,
    older_than_s: float | None,
    max_bytes: int | None,
    dry_run: bool,
) -> None:
    """Delete what is too old, and what is too much."""
    if older_than_s is None and max_bytes is None:
        raise click.UsageError("say what is too much: --older-than, --max-bytes, or both")

    async def work(store: ChunkStore, _url: str) -> int:
        from lmcache_qserver.upkeep import told
        from lmcache_qserver.upkeep.gc import delete, plan

        chosen = await plan(store, time.time(), older_than_s, max_bytes)
        for why, entries in (
            ("expired", chosen.expired),
            ("surplus", chosen.surplus),
            ("quarantined", chosen.quarantined),
        ):
            async for batch in delete(store, entries, dry_run):
                for entry in batch:
                    _tell(as_json, told.gone_record(entry, why), f"{why}  {entry.name}")
        total = told.gc_record(chosen)
        _tell(as_json, total, told.gc_summary(total, dry_run))
        return FINE

    _run(url, work, read_only=dry_run)


@l2.command("purge")
@_store_options
@_salt_options
@click.option("--model", required=True, help=_MODEL_HELP)
@click.option("--yes", is_flag=True, help="Do not ask.")
def purge_command(
    url: str | None,
    as_json: bool,
    model: str,
    salt: str | None,
    salt_digest: str | None,
    no_salt: bool,
    yes: bool,
) -> None:
    """Delete everything of a model, or of one salt of it."""
    selection = _selection(model, salt, salt_digest, no_salt)

    async def work(store: ChunkStore, _url: str) -> int:
        from lmcache_qserver.upkeep import told
        from lmcache_qserver.upkeep.purge import purge_selected

        if not yes:
            meant = await purge_selected(store, selection, dry_run=True)
            click.echo(told.purge_summary(meant, "would go"), err=True)
            if meant.objects or meant.quarantined:
                click.confirm("Delete them for good?", abort=True, err=True)
        counts = await purge_selected(store, selection)
        _tell(as_json, told.purge_record(counts), told.purge_summary(counts, "deleted"))
        click.echo(told.STILL_IN_MEMORY, err=True)
        return FINE

    _run(url, work, read_only=False)
