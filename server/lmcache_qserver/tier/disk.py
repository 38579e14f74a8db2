"""Objects as files below one folder: what a thread does for `FileStore`. Blocking; any number of threads.

How bytes go into a file is in writing.py, and how they come out of it in reading.py.

    ROOT/                    ours, 0700
        .tmp/                files that are being written, each locked (flock) by its writer
        v1/MODEL/.../NAME    objects, 0600; complete from the moment they have a name
        quarantine/v1/...    objects that were found to be broken, in folders like theirs; made when there is one

    A put
      1. a new file in .tmp, O_EXCL, locked
      2. writev, fdatasync                      the bytes are on the disk
      3. link to the object's name              fails if the name exists: create only, and no reader sees half a file
      4. fsync of the folder                    the name is on the disk; only then is the put answered
      5. unlink in .tmp

    Folders that a put makes are synced into their parents before the first answer that relies on them, whoever made
    them; a name that exists is answered `already_there` after a sync of its folder, because its writer may not have got
    so far. (Measured without 4: a power cut loses acknowledged objects. Without 2: it leaves empty ones.)

    A writer that dies leaves its file in .tmp without a lock. Whoever opens the store next deletes such files. Between
    creating a file and locking it there is a moment in which a sweeper takes a living writer's file away; the writer
    finds out when it links, and writes again.

    File systems without hard links get renameat2 with RENAME_NOREPLACE instead.

ROOT is held as an open folder: if another file system is mounted over it, or it is taken away, nothing is written
elsewhere. .tmp is made at opening only, so a folder that was emptied under us says so and fills no wrong disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence

from lmcache_qserver.tier.chunk_store import (
    MAX_NAME_CHARS,
    Entry,
    Observe,
    PutOutcome,
    is_name,
    kept_name,
)
from lmcache_qserver.tier.errors import Corrupt, Full, NotThere, Refused, TierError, Unavailable
from lmcache_qserver.tier.helper import Helper
from lmcache_qserver.tier.reading import Reading
from lmcache_qserver.tier.writing import write_all

TMP = ".tmp"
ATTEMPTS = 3
"""Puts of one object before giving up; each time something has taken its file or folder away."""
RENAME_NOREPLACE = 1

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Non-blocking for the sake of what is no file: opening a pipe would wait for its writer."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_REFUSED = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Disk:
    """The folder. Create it in a thread.

    Args:
        root: absolute path. It is made if only its last part is missing.
        direct: write with O_DIRECT, where the file system has it.
        read_only: nothing is made, swept, tried or marked as used, and the folder may be another user's. Whoever
            opens it so does not write.

    Raises:
        Refused, Unavailable: it can't be used; says why.
    """

    def __init__(self, root: str, direct: bool = False, read_only: bool = False) -> None:
        self.root = root
        self._read_only = read_only
        self._direct = os.O_DIRECT if direct else 0
        self._synced: set[str] = (
            set()
        )  # folders whose names are on the disk; threads only add and discard
        with _told(root):
            self._root = _open_root(root, read_only)
            try:
                if not read_only:
                    self._prepare()
            except BaseException:
                os.close(self._root)
                raise
        self._helper = Helper("l2-files-helper")

    def close(self) -> None:
        """No other call may be running or come; closing again does nothing."""
        if self._root >= 0:
            self._helper.close()
            os.close(self._root)
            self._root = -1

    # --- operations ---

    def put(self, name: str, parts: Sequence[memoryview]) -> PutOutcome:
        """See `ChunkStore.put`."""
        with _told(name):
            for _ in range(ATTEMPTS):
                if self._exists(name):
                    self._sync(os.path.dirname(name))
                    return PutOutcome.ALREADY_THERE
                with contextlib.suppress(FileNotFoundError):
                    return self._write(name, parts)
                self._synced.clear()
            raise Unavailable(f"{self.root}: its files or folders are being taken away")

    def get_into(
        self,
        name: str,
        targets: Sequence[memoryview],
        offset: int,
        to_end: bool,
        observe: Observe | None = None,
    ) -> None:
        """See `ChunkStore.get_into`."""
        wanted = sum(target.nbytes for target in targets)
        with _told(name, missing=NotThere), self._opened_to_read(name) as fd:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"{name} is not a file")
            if found.st_size < offset + wanted or (to_end and found.st_size != offset + wanted):
                raise Corrupt(f"{name} has {found.st_size} bytes instead of {offset + wanted}")
            Reading(fd, name, targets, offset, observe).run(self._helper.ask)
            if not offset and not self._read_only:
                _mark_used(fd, found)

    def head(self, name: str) -> Entry | None:
        """See `ChunkStore.head`."""
        with _told(name):
            try:
                found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
            except FileNotFoundError:
                return None
            return _entry(name, found)

    def delete(self, names: Sequence[str]) -> None:
        """See `ChunkStore.delete`; names that are gone stay gone after a power cut."""
        folders = set()
        for name in names:
            with _told(name), contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._root)
                folders.add(os.path.dirname(name))
        for folder in folders:
            with _told(folder), contextlib.suppress(FileNotFoundError):
                self._sync(folder)

    def quarantine(self, name: str) -> None:
        """See `ChunkStore.quarantine`.

        After a power cut it has left its name, so that a purge of its quarantine is for good; it need not be there.
        """
        with _told(name), contextlib.suppress(FileNotFoundError):
            if not self._exists(name):
                return
            kept = kept_name(name)
            self._make_folders_to_keep(os.path.dirname(kept))
            os.rename(name, kept, src_dir_fd=self._root, dst_dir_fd=self._root)
            self._sync(os.path.dirname(name))

    def folders(self, prefix: str) -> list[str]:
        """See `ChunkStore.folders`."""
        with _told(prefix):
            return sorted(self._scan(prefix)[0])

    def entries(self, prefix: str) -> Iterator[Entry]:
        """All objects below a folder, and nothing else that lies there; in memory are one folder's at a time."""
        waiting = [prefix]
        while waiting:
            folder = waiting.pop()
            with _told(folder):
                folders, entries = self._scan(folder)
            waiting.extend(folders)
            yield from entries

    # --- opening ---

    def _prepare(self) -> None:
        """See that the folder is ours and can be written, and take away what dead writers left."""
        found = os.fstat(self._root)
        if found.st_uid != os.geteuid():
            raise Refused(f"{self.root} belongs to user {found.st_uid}, not to {os.geteuid()}")
        if stat.S_IMODE(found.st_mode) & 0o022:
            raise Refused(f"{self.root} can be written by others: chmod go-w {self.root}")
        with contextlib.suppress(FileExistsError):
            os.mkdir(TMP, 0o700, dir_fd=self._root)
        self._sweep()
        fd, probe = self._create_temporary()
        os.close(fd)
        os.unlink(probe, dir_fd=self._root)
        os.fsync(self._root)

    def _sweep(self) -> None:
        """What is no file, or not ours to open, is no writer's and stays: it must not keep a server from starting."""
        with self._opened(TMP, _FOLDER) as folder:
            for left in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
                    found = os.stat(left, dir_fd=folder, follow_symlinks=False)
                    if not stat.S_ISREG(found.st_mode):
                        continue
                    fd = os.open(left, _READ | os.O_CLOEXEC, dir_fd=folder)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(left, dir_fd=folder)
                    finally:
                        os.close(fd)

    # --- a put ---

    def _exists(self, name: str) -> bool:
        try:
            found = os.stat(name, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{name} is not a file")
        return True

    def _write(self, name: str, parts: Sequence[memoryview]) -> PutOutcome:
        """FileNotFoundError: something was taken away; nothing is left of the attempt."""
        folder = os.path.dirname(name)
        fd, temporary = self._create_temporary()
        try:
            self._make_folder(folder)
            write_all(fd, parts, self._direct)
            os.fdatasync(fd)
            outcome = self._give_name(temporary, name)
            self._sync(folder)
        finally:
            # Closed last, so that the lock covers the file as long as it has its temporary name.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=self._root)
            os.close(fd)
        return outcome

    def _create_temporary(self) -> tuple[int, str]:
        temporary = f"{TMP}/{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(temporary, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:
            raise Unavailable(f"{self.root}/{TMP} is gone: was the disk taken away?") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # a sweeper has it, and takes it away; linking will tell
        except BaseException:
            os.close(fd)
            raise
        return fd, temporary

    def _give_name(self, temporary: str, name: str) -> PutOutcome:
        try:
            try:
                os.link(
                    temporary,
                    name,
                    src_dir_fd=self._root,
                    dst_dir_fd=self._root,
                    follow_symlinks=False,
                )
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                rename_new(self._root, temporary, name)
        except FileExistsError:
            return PutOutcome.ALREADY_THERE
        return PutOutcome.WRITTEN

    def _make_folder(self, folder: str) -> None:
        if not folder or folder in self._synced:
            return
        parent = os.path.dirname(folder)
        if parent:
            self._make_folder(parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700, dir_fd=self._root)
        self._sync(parent)
        self._synced.add(folder)

    def _make_folders_to_keep(self, folder: str) -> None:
        """Each time anew and unsynced: a person may have emptied the quarantine. Links lead nowhere."""
        made = ""
        for segment in folder.split("/"):
            made = os.path.join(made, segment)
            with contextlib.suppress(FileExistsError):
                os.mkdir(made, 0o700, dir_fd=self._root)
            with self._opened(made, _FOLDER):
                pass

    def _sync(self, folder: str) -> None:
        with self._opened(folder or ".", os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    # --- reading ---

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        fd = os.open(name, flags | os.O_CLOEXEC, dir_fd=self._root)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened_to_read(self, name: str) -> Iterator[int]:
        """Who only looks leaves the time of last use alone, which the kernel sets as well; only the owner may ask."""
        with contextlib.ExitStack() as stack:
            fd = -1
            if self._read_only:
                with contextlib.suppress(PermissionError):
                    fd = stack.enter_context(self._opened(name, _READ | os.O_NOATIME))
            yield fd if fd >= 0 else stack.enter_context(self._opened(name, _READ))

    def _scan(self, folder: str) -> tuple[list[str], list[Entry]]:
        """Folders and objects in a folder; nothing for one that is not there."""
        folders: list[str] = []
        entries: list[Entry] = []
        try:
            with (
                self._opened(folder or ".", _FOLDER) as fd,
                os.scandir(fd) as found,
            ):
                for item in found:
                    name = f"{folder}/{item.name}" if folder else item.name
                    if not is_name(name):
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        if item.is_dir(follow_symlinks=False):
                            folders.append(name)
                        elif item.is_file(follow_symlinks=False):
                            entries.append(_entry(name, item.stat(follow_symlinks=False)))
        except (FileNotFoundError, NotADirectoryError):
            pass
        return folders, entries


def _open_root(root: str, read_only: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return os.open(root, flags)
    except FileNotFoundError:
        if read_only:
            raise Refused(f"{root} does not exist") from None
    try:
        os.mkdir(root, 0o700)
    except FileNotFoundError:
        parent = os.path.dirname(root.rstrip("/"))
        raise Refused(
            f"{parent} does not exist (a disk that is not mounted?): make it first"
        ) from None
    except FileExistsError:
        pass
    return os.open(root, flags)


@contextlib.contextmanager
def _told(what: str, missing: type[TierError] = Unavailable) -> Iterator[None]:
    """OSErrors become errors of the tier."""
    try:
        yield
    except OSError as error:
        code = error.errno
        reason = f"{what}: {os.strerror(code) if code else error}"
        if code == errno.ENOENT:
            raise missing(reason) from None
        if code in _FULL:
            raise Full(reason) from None
        raise (Refused if code in _REFUSED else Unavailable)(reason) from None


def _entry(name: str, found: os.stat_result) -> Entry:
    return Entry(name, found.st_size, found.st_mtime, used=max(found.st_mtime, found.st_atime))


def _mark_used(fd: int, found: os.stat_result) -> None:
    """The kernel would not on a noatime mount, and once a day on most others. Where nobody may, nobody knows."""
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(time.time_ns(), found.st_mtime_ns))


def rename_new(folder: int, old: str, new: str) -> None:
    """Rename below an open folder; an existing `new` is FileExistsError."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.renameat2(
        folder, os.fsencode(old), folder, os.fsencode(new), ctypes.c_uint(RENAME_NOREPLACE)
    )
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), new)


assert MAX_NAME_CHARS < 4096, "a name is a path"
