"""The workers' token."""

from __future__ import annotations

import pytest

from gemmserve_service.processes.ray.join_token import read_token


def test_the_token_of_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("gs_secret\n")
    assert read_token(file) == "gs_secret"
    assert read_token(None) is None


def test_no_token_where_one_is_said_to_be(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        read_token(tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        read_token(tmp_path / "none")
