"""A connection without a socket: requests are kept, and a test answers them when it likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from lmcache_qclient.link.requests import ReplyFuture
from lmcache_qprotocol.operations import Operation


@dataclass
class FakeLink:
    """Answers at once what `answer` has an answer to; what it gives None for stays open.

    Attributes:
        sent: (operation's name, payloads), bulk frames as bytes.
        open: futures of part requests without an answer.
    """

    answer: Callable[[str, tuple[Any, ...]], Any]
    sent: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    open: list[ReplyFuture] = field(default_factory=list)
    most_open: int = 0

    def submit(self, operation: Operation, payloads: Sequence[Any]) -> ReplyFuture:
        kept = tuple(bytes(one) if isinstance(one, memoryview) else one for one in payloads)
        self.sent.append((operation.name, kept))
        future = ReplyFuture(b"uid")
        found = self.answer(operation.name, kept)
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(None if found == "none" else found)
        else:
            self.open.append(future)
            self.most_open = max(self.most_open, sum(not one.done() for one in self.open))
        return future

    def call(self, operation: Operation, payloads: Sequence[Any], timeout_s: float) -> Any:
        return self.submit(operation, payloads).result(timeout_s)

    def forget(self, future: ReplyFuture) -> bool:
        return not future.done()


def connection_over(link: FakeLink, bulk_bytes: int) -> Any:
    """As much of a `Connection` as a sender of bytes uses."""
    hello = SimpleNamespace(limits=SimpleNamespace(bulk_bytes=bulk_bytes))
    return SimpleNamespace(link=link, hello=hello, url="fake://")
