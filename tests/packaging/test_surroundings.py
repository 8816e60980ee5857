"""The suite beside a user's own settings, keys and data: it sees none of them; its processes wait for no message."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.keyring import create_key, read_keyring

LOOKS_AT_THEM = ("tests/unit/service/test_settings.py", "tests/packaging/test_surroundings.py")


def test_home_is_the_run_s_own() -> None:
    assert Path.home().parent == Path(tempfile.gettempdir())
    assert not [name for name in os.environ if name.startswith("XDG_")]
    assert {name for name in os.environ if name.startswith("GEMMSERVE_")} <= {
        "GEMMSERVE_KERNEL_CACHE",
        "GEMMSERVE_HTTP_LIBRARY",
    }


def test_settings_are_the_defaults_and_there_are_no_keys() -> None:
    settings = Settings()
    assert (settings.port, settings.host) == (8000, "127.0.0.1")
    assert not read_keyring(settings.data_dir, None).keys


def test_counts_of_second_tries_are_sent_at_once(request) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("processes that run tests (-n) have a connection for these counts; there is one process here")
    assert request.config.failures_db.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif("NESTED" in os.environ, reason="this is the run inside")
def test_a_user_who_has_keys_and_settings(tmp_path, root) -> None:
    create_key(tmp_path / "home" / ".local" / "share" / "gemmserve", "mine")
    create_key(tmp_path / "xdg" / "gemmserve", "mine")
    poisoned = {
        "HOME": str(tmp_path / "home"), "XDG_DATA_HOME": str(tmp_path / "xdg"), "GEMMSERVE_PORT": "http",
        "GEMMSERVE_HOST": "0.0.0.0", "GEMMSERVE_API_KEY": "gs_mine", "NESTED": "1",
    }  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | poisoned
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1"]
    done = subprocess.run(
        [*command, *LOOKS_AT_THEM], cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
