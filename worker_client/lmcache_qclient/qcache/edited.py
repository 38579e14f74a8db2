"""An edited tensor that comes in to be stored: is it what the layout says, and the bits under it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lmcache_qclient.qcache import tensors
from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qclient.qcache.stitch import Bits, bits_dtype


def edited_bits(tensor: Any, layout: StoredLayout, num_tokens: int) -> list[Bits]:
    """The bits of what is to be stored, one array `[layers, tokens, heads, head_dim]` for each shape of layers.

    Args:
        tensor: a torch tensor (of any device) or numpy array; of several shapes of layers, a list in the order of the
            layout's groups. Of a type that numpy lacks, a numpy array is the bits, as `Retrieval.numpy` gives them.

    Returns:
        No copies, but of what lies on a device.

    Raises:
        TypeError: it is something else.
        ValueError: another shape or type; what is expected is said.
    """
    groups = layout.groups
    given = list(tensor) if isinstance(tensor, list | tuple) else [tensor]
    if len(given) != len(groups):
        expected = "; ".join(_expected(group, num_tokens) for group in groups)
        raise ValueError(
            f"{len(given)} tensors were given, and the layout has {len(groups)} shapes of layers: pass one for each, "
            f"in this order: {expected}"
        )
    return [_bits(one, group, num_tokens) for one, group in zip(given, groups, strict=True)]


def _bits(tensor: Any, layout: StoredLayout, num_tokens: int) -> Bits:
    if not isinstance(tensor, torch.Tensor | np.ndarray):
        raise TypeError(f"store takes a torch tensor or numpy array, not a {type(tensor).__name__}")
    shape = (len(layout.layer_ids), num_tokens, layout.num_heads, layout.head_dim)
    if tuple(tensor.shape) != shape or not _has_type(tensor, layout):
        raise ValueError(
            f"the tensor is {list(tensor.shape)} {tensor.dtype}, and {_expected(layout, num_tokens)} is needed: all "
            "layers and heads, one row per token id, in the stored type (values are never cast)"
        )
    if isinstance(tensor, np.ndarray):
        return tensor.view(bits_dtype(layout.dtype))
    return tensors.bits_of(tensor.detach().cpu(), layout)


def _has_type(tensor: torch.Tensor | np.ndarray[Any, Any], layout: StoredLayout) -> bool:
    torch_dtype = tensors.torch_dtype(layout.dtype)
    if isinstance(tensor, torch.Tensor):
        return tensor.dtype == torch_dtype
    known = tensors.numpy_of(
        torch.empty(0, dtype=torch_dtype)
    ).dtype  # the bits', where there is no such type
    return tensor.dtype.isnative and tensor.dtype.name in (layout.dtype, known.name)


def _expected(layout: StoredLayout, num_tokens: int) -> str:
    shape = [len(layout.layer_ids), num_tokens, layout.num_heads, layout.head_dim]
    return f"{shape} {layout.dtype} [layers, tokens, heads, head_dim]"
