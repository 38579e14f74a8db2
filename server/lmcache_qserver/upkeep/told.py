"""What the commands tell: records for machines, lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmcache_qserver.face.amounts import duration, plain, size
from lmcache_qserver.tier import Entry
from lmcache_qserver.tier.paths import Address, unquote
from lmcache_qserver.upkeep.gc import Plan
from lmcache_qserver.upkeep.ls import Listed
from lmcache_qserver.upkeep.purge import PurgeCounts
from lmcache_qserver.upkeep.usage import Tally, Usage
from lmcache_qserver.upkeep.verify import FOREIGN, GONE, WHOLE, Verdict

LAYOUT_CHARS = 12
"""Of a layout id, for people; as in `lmcache-qserver status`."""
LISTING_HEAD = ("model", "layout", "rank", "salt", "rows", "tokens", "bytes", "age")


# --- addresses ----------------------------------------------------------------------------------------------------


def model_of(folder: str) -> str:
    """A model's name; what there is of it if it was too long for a name."""
    return plain(unquote(folder) or folder)


def rank_of(address: Address) -> str:
    """rank/world."""
    return f"{address.kv_rank >> 16 & 0xFF}/{address.world_size}"


def family_record(address: Address) -> dict[str, Any]:
    """What all objects of one model, layout and rank share."""
    return {
        "model_name": address.model_name,
        "model_folder": address.model_folder,
        "layout_id": address.layout_id.hex(),
        "world_size": address.world_size,
        "kv_rank": address.kv_rank,
    }


# --- ls -----------------------------------------------------------------------------------------------------------


def listed_record(listed: Listed) -> dict[str, Any]:
    """One object."""
    entry, address, header = listed.found.entry, listed.found.address, listed.header
    record: dict[str, Any] = {"kind": "foreign" if address is None else "object"}
    record |= {"name": entry.name, "bytes": entry.nbytes}
    record |= {"modified": entry.modified, "used": entry.used}
    if address is not None:
        record |= family_record(address)
        record |= {"salt": address.salt, "rows": address.rows}
        record |= {"chunk_hash": address.chunk_hash.hex(), "parent": address.parent.hex()}
    if header is not None:
        record |= {"model_name": header.model_name, "rows": header.rows}
        record |= {"token_range": _token_range(listed), "created": header.created}
    if listed.error:
        record["error"] = listed.error
    return record


def listing_line(cells: tuple[str, ...], is_long: bool) -> str:
    """One line of cells as in LISTING_HEAD."""
    model, layout, rank, salt, rows, tokens, nbytes, age = cells
    middle = f" {tokens:>15}" if is_long else ""
    return f"{model:<40} {layout:<12} {rank:>7} {salt:<32} {rows:>9}{middle} {nbytes:>10} {age:>12}"


def listed_cells(listed: Listed, now: float) -> tuple[str, ...]:
    """One object of ours, for `listing_line`."""
    entry, address, header = listed.found.entry, listed.found.address, listed.header
    assert address is not None
    rows = address.rows if header is None else header.rows
    tokens = _token_range(listed)
    return (
        model_of(address.model_folder) if header is None else plain(header.model_name),
        address.layout_id.hex()[:LAYOUT_CHARS] or "-",
        rank_of(address),
        address.salt or "-",
        "all" if rows is None else f"{rows[0]}-{rows[1]}",
        listed.error or ("-" if tokens is None else f"{tokens[0]}-{tokens[1]}"),
        size(entry.nbytes),
        _age(now, entry.modified),
    )


def _token_range(listed: Listed) -> tuple[int, int] | None:
    header = listed.header
    if header is None or header.start is None:
        return None
    return header.start + header.rows[0], header.start + header.rows[1]


def _age(now: float, then: float | None) -> str:
    return "-" if then is None else duration(max(0.0, now - then))


# --- du -----------------------------------------------------------------------------------------------------------


def tally_record(tally: Tally) -> dict[str, Any]:
    """A sum."""
    return {
        "objects": tally.objects,
        "pieces": tally.pieces,
        "bytes": tally.nbytes,
        "oldest": tally.oldest,
        "newest": tally.newest,
    }


def usage_records(usage: Usage) -> list[dict[str, Any]]:
    """A record for each model, layout and rank, and the total."""
    records = [
        {"kind": "family", **family_record(address), **tally_record(tally)}
        for address, tally in sorted(usage.families.items(), key=lambda item: item[0].name)
    ]
    total = {
        "kind": "total",
        **tally_record(usage.total),
        "quarantined": usage.quarantined[0],
        "quarantined_bytes": usage.quarantined[1],
        "foreign": usage.foreign.objects,
        "foreign_bytes": usage.foreign.nbytes,
    }
    return [*records, total]


def usage_lines(usage: Usage, now: float) -> list[str]:
    """For people."""
    head = ("model", "layout", "rank", "objects", "pieces", "bytes", "oldest", "newest")
    rows = [head]
    for address, tally in sorted(usage.families.items(), key=lambda item: item[0].name):
        layout = address.layout_id.hex()[:LAYOUT_CHARS] or "-"
        first = (model_of(address.model_folder), layout, rank_of(address))
        rows.append((*first, *_tally_cells(tally, now)))
    rows.append(("total", "", "", *_tally_cells(usage.total, now)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    count, nbytes = usage.quarantined
    lines.append(f"in quarantine: {count} objects, {size(nbytes)}")
    if usage.foreign.objects:
        foreign = usage.foreign
        lines.append(f"names that are not ours: {foreign.objects}, {size(foreign.nbytes)}")
    return lines


def _tally_cells(tally: Tally, now: float) -> tuple[str, str, str, str, str]:
    return (
        str(tally.objects),
        str(tally.pieces),
        size(tally.nbytes),
        _age(now, tally.oldest),
        _age(now, tally.newest),
    )


# --- verify -------------------------------------------------------------------------------------------------------


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """One object that is not whole."""
    return {
        "kind": "verdict",
        "verdict": verdict.code,
        "name": verdict.entry.name,
        "bytes": verdict.entry.nbytes,
        "why": verdict.why,
        "moved": verdict.is_moved,
    }


def verdict_line(verdict: Verdict) -> str:
    """For people."""
    text = f"{verdict.code}  {verdict.entry.name}"
    if verdict.why:
        text += f"\n    {plain(verdict.why)}"
    return text + ("\n    moved to quarantine" if verdict.is_moved else "")


def verify_summary(counts: Mapping[str, int], nbytes: int, seconds: float) -> str:
    """For people.

    Args:
        counts: of verdicts, by code.
        nbytes: of what is whole.
    """
    others = [
        f"{count} {code}"
        for code, count in sorted(counts.items())
        if code not in (WHOLE, GONE, FOREIGN)
    ]
    told = [f"{counts.get(WHOLE, 0)} objects whole", *(others or ["nothing wrong"])]
    if gone := counts.get(GONE, 0):
        told.append(f"{gone} deleted meanwhile")
    if foreign := counts.get(FOREIGN, 0):
        told.append(f"{foreign} names not ours")
    speed = nbytes / 1e9 / max(seconds, 1e-9)
    return f"{', '.join(told)}; {nbytes / 1e9:.3f} GB in {seconds:.1f} s, {speed:.2f} GB/s"


# --- gc -----------------------------------------------------------------------------------------------------------


def gone_record(entry: Entry, why: str) -> dict[str, Any]:
    """One object that goes; `why`: expired, surplus, quarantined."""
    return {"kind": "gone", "why": why, "name": entry.name, "bytes": entry.nbytes}


def gc_record(plan: Plan) -> dict[str, Any]:
    """The sum of what went, what went from quarantine apart, and what stays."""
    gone = [*plan.expired, *plan.surplus]
    return {
        "kind": "total",
        "objects": len(gone),
        "bytes": sum(entry.nbytes for entry in gone),
        "quarantined": len(plan.quarantined),
        "quarantined_bytes": sum(entry.nbytes for entry in plan.quarantined),
        "kept_objects": plan.kept_objects,
        "kept_bytes": plan.kept_bytes,
        "foreign": plan.foreign,
    }


def gc_summary(total: Mapping[str, Any], dry_run: bool) -> str:
    """The same for people."""
    foreign = f"; {total['foreign']} names not ours, left alone" if total["foreign"] else ""
    went = "would go" if dry_run else "deleted"
    kept = _quarantined(total["quarantined"], total["quarantined_bytes"], went)
    return (
        f"{total['objects']} objects {went}, {size(total['bytes'])}; "
        f"{total['kept_objects']} stay, {size(total['kept_bytes'])}{kept}{foreign}"
    )


def _quarantined(count: int, nbytes: int, went: str) -> str:
    return f"; {count} in quarantine {went}, {size(nbytes)}" if count else ""


# --- purge --------------------------------------------------------------------------------------------------------

STILL_IN_MEMORY = "Servers that run may still hold it in memory, and write it again: `lmcache-qserver purge` there."


def purge_record(counts: PurgeCounts) -> dict[str, Any]:
    """What went."""
    return {
        "kind": "total",
        "models": {unquote(folder) or folder: count for folder, count in counts.models.items()},
        "objects": counts.objects,
        "bytes": counts.nbytes,
        "foreign": counts.foreign,
        "quarantined": counts.quarantined,
        "quarantined_bytes": counts.quarantined_bytes,
    }


def purge_summary(counts: PurgeCounts, went: str) -> str:
    """For people: a line for each feature, and the sum."""
    lines = [
        f"{model_of(folder)}: {count} objects" for folder, count in sorted(counts.models.items())
    ]
    foreign = f"; {counts.foreign} names not ours, left alone" if counts.foreign else ""
    kept = _quarantined(counts.quarantined, counts.quarantined_bytes, went)
    lines.append(f"{counts.objects} objects {went}, {size(counts.nbytes)}{kept}{foreign}")
    return "\n".join(lines)
