"""What a build is told of this machine's pip: never a folder that it cannot see, never on the command line."""

from __future__ import annotations

import configparser
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module():
    spec = importlib.util.spec_from_file_location("pip_settings", ROOT / "tools/containers/pip_settings.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


LISTING = """\
:env:.cert='/etc/ca.pem'
:env:.disable-pip-version-check='1'
global.index-url='https://mirror.example/simple'
global.extra-index-url='file:///srv/simple https://user:p%w=d@other.example/simple'
global.find-links='/srv/wheels'
install.proxy='http://proxy.example:3128'
global.timeout='60'
"""


def test_what_a_build_can_use_is_kept(module):
    inside = module.inside(module.parse(LISTING))
    assert inside == {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "https://user:p%w=d@other.example/simple",
        "proxy": "http://proxy.example:3128",
        "timeout": "60",
        "cert": module.INSIDE,
    }


def test_a_variable_wins_over_a_file(module):
    listing = "global.index-url='https://a.example'\n:env:.index-url='https://b.example'\n"
    assert module.parse(listing)["index-url"] == "https://b.example"


def test_the_file_is_pips_and_for_its_owner_alone(module, tmp_path, monkeypatch):
    certificates = tmp_path / "system.pem"
    certificates.write_text("authorities")
    settings = module.parse(LISTING) | {"cert": str(certificates)}
    monkeypatch.setattr(module, "machine_settings", lambda: settings)
    config, ca = tmp_path / "pip.conf", tmp_path / "ca.pem"
    monkeypatch.setattr(module.sys, "argv", ["pip_settings.py", str(config), str(ca)])
    module.main()
    assert config.stat().st_mode & 0o077 == 0
    assert ca.read_text() == "authorities"
    reader = configparser.RawConfigParser()
    reader.read(config)
    assert reader["global"]["extra-index-url"].strip() == "https://user:p%w=d@other.example/simple"
    monkeypatch.setattr(module, "machine_settings", dict)
    module.main()
    assert ca.read_bytes() == b""


def test_this_machines_own_settings_can_be_read(module):
    assert isinstance(module.machine_settings(), dict)
