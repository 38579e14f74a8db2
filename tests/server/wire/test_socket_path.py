from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from lmcache_qserver.wire import socket_path


def test_the_socket_and_its_folder_are_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "x.sock"
    with socket_path.listen(path, others=False):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_others_may_reach_it_when_they_are_allowed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.sock"
    before = os.umask(0o077)
    try:
        with socket_path.listen(path, others=True):
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
    finally:
        os.umask(before)


def test_a_stale_socket_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    socket_path.listen(path, others=False).close()
    assert path.exists()
    with socket_path.listen(path, others=False) as listener, _connected(path):
        listener.accept()[0].close()


def test_a_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket_path.listen(path, others=False):
        before = socket_path.file_identity(path)
        with pytest.raises(OSError, match="another process answers"):
            socket_path.listen(path, others=False)
        assert socket_path.file_identity(path) == before


def test_a_stream_socket_that_answers_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(OSError, match="another process answers"):
            socket_path.listen(path, others=False)


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    path.write_text("precious")
    with pytest.raises(OSError, match="no socket"):
        socket_path.listen(path, others=False)
    assert path.read_text() == "precious"


def test_a_long_path_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="--lifeline"):
        socket_path.listen(tmp_path / ("x" * 120), others=False)


def test_only_ones_own_file_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    with socket_path.listen(path, others=False):
        identity = socket_path.file_identity(path)
    path.unlink()
    path.write_text("somebody else's")
    keeper = (tmp_path / "keeper").open(
        "w"
    )  # keeps the freed inode from being given to the new file
    socket_path.remove(path, (identity[0], identity[1] + 10**6))
    keeper.close()
    assert path.exists()
    socket_path.remove(path, socket_path.file_identity(path))
    assert not path.exists()
    socket_path.remove(path, identity)


def _connected(path: Path) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(str(path))
    return client
