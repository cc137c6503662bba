"""Where rings lie: private directories only, and names that cannot lead elsewhere."""

import os

import pytest

from hstransport.errors import ConfigError
from hstransport.session import (
    check_session_name,
    find_rings,
    find_sessions,
    ring_path,
    session_directory,
)


def test_directories_are_made_private(tmp_path):
    old = os.umask(0)
    try:
        directory = session_directory(tmp_path / "root", "s")
    finally:
        os.umask(old)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_directory_that_others_can_enter_is_refused(tmp_path):
    directory = session_directory(tmp_path / "root", "s")
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="0755"):
        session_directory(tmp_path / "root", "s")
    with pytest.raises(PermissionError):
        find_rings(tmp_path / "root", "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused(tmp_path):
    directory = session_directory(tmp_path / "root", "s")
    os.chown(directory, 12345, -1)
    with pytest.raises(PermissionError, match="12345"):
        find_rings(tmp_path / "root", "s")


def test_rings_are_found_oldest_first_and_strangers_ignored(tmp_path):
    root = tmp_path / "r"
    first = ring_path(root, "s", "0" * 12, 0).path
    first.touch()
    os.utime(first)
    second = ring_path(root, "s", "1" * 12, 1).path
    second.touch()
    (first.parent / "notes.txt").touch()
    (first.parent / "XYZ-0.ring").touch()
    assert [(r.run[0], r.rank) for r in find_rings(root, "s")] == [("0", 0), ("1", 1)]
    assert find_sessions(root) == ["s"]
    assert find_sessions(tmp_path / "absent") == []


def test_too_long_socket_path_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="shorter HSTRANSPORT_DIR"):
        ring_path(tmp_path / ("x" * 100), "s", "0" * 12, 0)


@pytest.mark.parametrize("name", ["", ".", "../x", "a b", "é", "x" * 65])
def test_session_names_that_could_lead_elsewhere_are_refused(name):
    with pytest.raises(ConfigError):
        check_session_name(name)
