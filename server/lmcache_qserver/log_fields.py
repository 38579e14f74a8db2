"""What a log record says to programs, beside its words; face/logs.py writes it."""

from __future__ import annotations

from typing import Any

OWN_KEYS = frozenset({"time", "level", "logger", "message", "exception"})
ATTRIBUTE = "told"
"""Of the log record."""


def told(**fields: Any) -> dict[str, dict[str, Any]]:
    """Fields of a record: `log.info("words", extra=told(instance=1))`; plain values, never a salt or a token.

    One name for one thing, in every record: instance, model, request, client, pid, operation, cause, seconds, bytes.
    """
    assert not OWN_KEYS & fields.keys(), "these names are the record's own"
    return {ATTRIBUTE: fields}
