"""The file of a Unix socket: who may reach it, and when an old one may be removed.

A socket file outlives a daemon that was killed. It is removed only when nobody answers behind it; anything else in its
place is left alone and is an error.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

MAX_PATH_BYTES = 107
"""sockaddr_un has 108, with the final NUL."""


def listen(path: Path, *, others: bool, backlog: int = 1024) -> socket.socket:
    """A listening, non-blocking SOCK_SEQPACKET socket at `path`; missing folders are made.

    Args:
        others: other users may connect (and are then judged by their uid): 0666 and 0711 instead of 0600 and 0700.

    Raises:
        OSError: the path is too long, taken, or its folder is not safe; the message says which.
    """
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(
            f"the path of a Unix socket has at most {MAX_PATH_BYTES} bytes: {path}; set --lifeline to a shorter one"
        )
    _prepare_folder(path.parent, 0o711 if others else 0o700)
    remove_stale(path, socket.SOCK_SEQPACKET, "--lifeline")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        # bind gives the file the mode of the socket's inode: there is no moment in which it is open to more.
        os.fchmod(listener.fileno(), 0o666 if others else 0o600)
        listener.bind(os.fspath(path))
        if others:
            os.chmod(path, 0o666)  # the umask has cut it
        listener.listen(backlog)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _prepare_folder(folder: Path, mode: int) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=mode)
        return
    except FileExistsError:
        pass
    found = folder.lstat()
    if folder.parent == Path("/tmp") and (
        not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022
    ):
        raise OSError(
            f"{folder} is not a folder of this user alone; remove it, or set --lifeline to another path"
        )


def remove_stale(path: Path, kind: int, option: str) -> None:
    """Make sure that nothing is at `path`, or nothing but the socket file of a dead process, which goes.

    Args:
        kind: SOCK_SEQPACKET or SOCK_STREAM.
        option: where the path was set, for the message.

    Raises:
        OSError: something else is there, or somebody answers.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(
            f"{path} is there and is no socket; remove it, or set {option} to another path"
        )
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass
    raise OSError(f"another process answers at {path}; stop it, or set {option} to another path")


def file_identity(path: Path) -> tuple[int, int]:
    """(device, inode) of the file."""
    found = path.lstat()
    return found.st_dev, found.st_ino


def remove(path: Path, identity: tuple[int, int]) -> None:
    """Remove the file if it is still the one with this identity."""
    try:
        if file_identity(path) == identity:
            path.unlink()
    except FileNotFoundError:
        pass
