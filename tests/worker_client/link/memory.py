"""Memory to pass around in tests."""

from __future__ import annotations

import fcntl
import os


def sealed_memory(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    """Descriptor of a memfd of `nbytes` zeros with these seals."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
