"""Token ids, in whatever a caller has them."""

from __future__ import annotations

from typing import Any

_WANTED = "pass a list, a tuple, or a 1-D integer array or tensor of one sequence"


def token_list(token_ids: Any) -> list[int]:
    """Plain ints of one sequence.

    Args:
        token_ids: list or tuple of ints, or a 1-D integer numpy array or torch tensor (on any device).

    Raises:
        TypeError: it is something else.
        ValueError: it has another number of axes, or an id outside [0, 2**32).
    """
    if isinstance(token_ids, list | tuple):
        ids = [_plain(token) for token in token_ids]
    elif hasattr(token_ids, "tolist") and hasattr(token_ids, "ndim"):
        ids = _from_array(token_ids)
    else:
        raise TypeError(f"token_ids can't be a {type(token_ids).__name__}: {_WANTED}")
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 32):
        raise ValueError("token ids must be in [0, 2**32): leave padding out")
    return ids


def _plain(token: Any) -> int:
    if type(token) is int:
        return token
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"token_ids holds a {type(token).__name__}: {_WANTED}")
    return int(token.__index__())


def _from_array(token_ids: Any) -> list[int]:
    if token_ids.ndim != 1:
        raise ValueError(
            f"token_ids has {token_ids.ndim} axes: {_WANTED}; of a batch, one row at a time"
        )
    ids: list[int] = token_ids.tolist()
    if ids and type(ids[0]) is not int:
        raise TypeError(f"token_ids holds {token_ids.dtype}: {_WANTED}")
    return ids
