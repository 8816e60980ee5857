"""Logs that cannot be written cost nobody anything."""

from __future__ import annotations

import logging
import sys

import pytest
import structlog

from gemmserve_service.runtime import logs


class FullDisk:
    def __init__(self):
        self.full = False
        self.text = ""

    def write(self, text):
        if self.full:
            raise OSError(28, "No space left on device")
        self.text += text
        return len(text)

    def flush(self):
        if self.full:
            raise OSError(28, "No space left on device")

    def isatty(self):
        return False


@pytest.fixture
def restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()


def test_a_full_disk_loses_lines_and_nothing_else(monkeypatch, settings, restored, capsys):
    disk = FullDisk()
    monkeypatch.setattr(sys, "stderr", disk)
    logs.configure(settings)
    for disk.full in (False, True, False):
        structlog.get_logger().info("request", full=disk.full)
        logging.getLogger("gemmserve_service.jobs.jobs").warning("standard %s", disk.full)
    assert disk.text.count("request") == disk.text.count("standard False") == 2
    assert "Traceback" not in disk.text
