"""The caller's tensor and the bits under it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lmcache_qclient.qcache.catalog import StoredLayout
from lmcache_qclient.qcache.stitch import Bits, bits_dtype

HUGE_PAGE = 2 << 20
MIN_HUGE_BYTES = 4 * HUGE_PAGE
MADV_HUGEPAGE = 14

_libc = ctypes.CDLL(None)

_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types that both torch and numpy know."""


def copy_threads() -> int:
    """How many threads a copy may take: as many as torch itself would, which the user may set."""
    return torch.get_num_threads()


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name of `DTYPE_BYTES`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def empty(layout: StoredLayout, num_layers: int, num_tokens: int) -> torch.Tensor:
    """An uninitialised tensor `[num_layers, num_tokens, heads, head_dim]`."""
    shape = (num_layers, num_tokens, layout.num_heads, layout.head_dim)
    tensor = torch.empty(shape, dtype=torch_dtype(layout.dtype))
    _ask_for_huge_pages(tensor)
    return tensor


def _ask_for_huge_pages(tensor: torch.Tensor) -> None:
    """Making pages costs twice as much as copying into them, and one large page a fraction of 512 small ones.

    A wish: the kernel may have none to give, or not know the word.
    """
    start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if end - start >= MIN_HUGE_BYTES:
        _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)


def check_out(out: torch.Tensor, layout: StoredLayout, layers: int, num_tokens: int) -> None:
    """Make sure that `num_tokens` tokens of `layers` layers fit into the caller's tensor.

    Raises:
        TypeError: it is no tensor.
        ValueError: they don't, or it is not a contiguous CPU tensor of the stored type.
    """
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a torch tensor, not a {type(out).__name__}")
    heads, head_dim = layout.num_heads, layout.head_dim
    fits = out.dim() == 4 and (out.shape[0], *out.shape[2:]) == (layers, heads, head_dim)
    if not fits or out.shape[1] < num_tokens:
        raise ValueError(
            f"out has shape {list(out.shape)}, and [{layers}, {num_tokens} or more, {heads}, {head_dim}] is needed"
        )
    if out.dtype != torch_dtype(layout.dtype):
        raise ValueError(
            f"out has dtype {out.dtype}, and what is stored has {torch_dtype(layout.dtype)}"
        )
    if out.device.type != "cpu" or not out.is_contiguous():
        raise ValueError(
            "out must be a contiguous tensor on the CPU: copy it to where you need it afterwards"
        )


def numpy_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's memory as NumPy sees it; the bits where NumPy lacks the type."""
    try:
        array: npt.NDArray[Any] = tensor.detach().numpy()
    except TypeError:
        bits = tensor.detach().view(_INTEGER[tensor.element_size()]).numpy()
        array = bits.view(np.dtype(f"u{tensor.element_size()}"))
    return array


def bits_of(tensor: torch.Tensor, layout: StoredLayout) -> Bits:
    """The tensor's memory as unsigned integers, same shape; no copy."""
    dtype = bits_dtype(layout.dtype)
    return tensor.detach().view(_INTEGER[dtype.itemsize]).numpy().view(dtype)
