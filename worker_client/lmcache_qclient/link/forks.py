"""What must not live on in forked children.

A child that keeps a copy of the lifeline's descriptor keeps a dead parent alive in the server's eyes. Python calls the
functions of `os.register_at_fork` for ever, so there is one, over a set that forgets what nobody uses any more.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ClosesInChild(Protocol):
    """Something that holds descriptors, or the parent's locks and threads."""

    def close_in_child(self) -> None:
        """Give up the child's copies; called with only one thread alive, and the parent's locks in any state."""


_holders: weakref.WeakSet[ClosesInChild] = weakref.WeakSet()


def close_in_children(holder: ClosesInChild) -> None:
    """From now on every forked child calls `holder.close_in_child()` first of all."""
    _holders.add(holder)


def _after_fork_in_child() -> None:
    for holder in list(_holders):
        holder.close_in_child()
    _holders.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
