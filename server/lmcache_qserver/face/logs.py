"""Log lines on standard error, as text or as one JSON object a line.

A record is an event in words. What a program wants of it beside the words goes along as fields (log_fields.py): text
shows them as `name=value` behind the words, JSON as keys of their own. Names of fields are stable, words are not.

Whatever a peer has sent can't forge a line: control characters are escaped, and the further lines of a traceback are
indented.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time

from lmcache_qserver.log_fields import ATTRIBUTE

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x80-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """`date time level logger: message name=value ...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line, with the fields behind it."""
        fields = getattr(record, ATTRIBUTE, {})
        behind = "".join(f" {name}={value!r}" for name, value in fields.items())
        return super().formatMessage(record) + behind

    def format(self, record: logging.LogRecord) -> str:
        """See the file's head."""
        return _CONTROL.sub(_escaped, super().format(record)).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "message", fields..., "exception"?}`; time is UTC, ISO 8601."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the record holds."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, ATTRIBUTE, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _escaped(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def set_up(log_format: str, log_level: str) -> None:
    """Send all logs of the process to standard error.

    Args:
        log_format: "text" or "json".
        log_level: "debug", "info", "warning" or "error": lines below it are left out.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
