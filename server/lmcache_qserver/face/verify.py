"""`lmcache-qserver verify`, in words."""

from __future__ import annotations

from lmcache_qprotocol.messages import VerifyReply


def in_words(reply: VerifyReply) -> str:
    """The outcome for people."""
    return (
        f"{reply.nbytes / 1e9:.2f} GB hashed: {reply.verified} objects as they were stored, {reply.made} without a "
        f"checksum until now, {reply.corrupt} changed in memory and dropped"
    )
