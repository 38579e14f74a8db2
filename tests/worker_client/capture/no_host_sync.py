"""A guard: inside it, whatever would make the host wait for a device fails, also where there is none.

On a GPU these calls return only when all work queued before them is done, so one of them per layer makes the engine run
step by step. A CPU tensor hides that. So the guard knows them by name: what goes through torch is caught there
(`.item()`, `nonzero`, indexing by a boolean mask, copies off the device), what reads memory directly at the method.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
WAITING = {
    ATEN._local_scalar_dense,
    ATEN.nonzero,
    ATEN.nonzero_static,
    ATEN.masked_select,
    ATEN.masked_scatter,
    ATEN.is_nonzero,
    ATEN.equal,
    ATEN.unique_dim,
    ATEN._unique2,
    ATEN.repeat_interleave,
}
"""Their results' sizes or values are needed on the host."""
INDEXING = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
"""With a boolean mask they count its ones on the host first."""
METHODS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


class HostSyncError(AssertionError):
    """The host would have waited for the device."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own __init_subclass__
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        packet = func.overloadpacket
        masks = packet in INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        )
        if packet in WAITING or masks:
            raise HostSyncError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, a host synchronisation raises `HostSyncError`."""

    def refuse(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise HostSyncError(f"Tensor.{name} waits for the device")

        return method

    with contextlib.ExitStack() as stack:
        for name in METHODS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, refuse(name)))
        stack.enter_context(_Watch())  # type: ignore[no-untyped-call]  # torch's own __init__
        yield
