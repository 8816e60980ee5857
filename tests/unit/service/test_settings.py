"""Settings: variables, bounds, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from gemmserve_service.settings import Settings, default_data_dir, parse_size


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith("GEMMSERVE_")]:
        monkeypatch.delenv(name)


def test_defaults(monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    settings = Settings()
    assert (settings.host, settings.port, settings.device) == ("127.0.0.1", 8000, "auto")
    assert settings.data_dir == Path("/somewhere/gemmserve")
    monkeypatch.delenv("XDG_DATA_HOME")
    assert default_data_dir() == Path("~/.local/share/gemmserve").expanduser()


def test_every_setting_has_a_description():
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_variables_and_arguments(monkeypatch):
    monkeypatch.setenv("GEMMSERVE_PORT", "1234")
    monkeypatch.setenv("GEMMSERVE_DEFAULT_TTL_S", "5")
    monkeypatch.setenv("GEMMSERVE_RESULT_TTL_S", "none")
    monkeypatch.setenv("GEMMSERVE_ALLOWED_HOSTS", "a.example, b.example ,")
    monkeypatch.setenv("GEMMSERVE_LOG_JSON", "1")
    settings = Settings(default_ttl_s=None)
    assert settings.port == 1234
    assert settings.default_ttl_s is None  # an argument wins
    assert settings.result_ttl_s is None
    assert settings.allowed_hosts == ["a.example", "b.example"]
    assert settings.log_json is True


def test_what_a_child_is_told_is_what_the_parent_has(monkeypatch):
    settings = Settings(port=0, device="cuda:0,cuda:1", allowed_hosts=["x"], default_ttl_s=None, result_ttl_s=7)
    monkeypatch.setenv("GEMMSERVE_PORT", "99")
    monkeypatch.setenv("GEMMSERVE_DEFAULT_TTL_S", "99")
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_paths_are_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert Settings(data_dir="here").data_dir == tmp_path / "here"
    assert Settings(data_dir="~/x").data_dir == Path("~/x").expanduser()


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda:0", "CUDA:1 ", "rocm:0,rocm:3"])
def test_devices(device):
    assert Settings(device=device).device == device.strip().lower()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"device": "gpu"}, "is not auto, cpu"),
        ({"device": "cuda:"}, "is not auto, cpu"),
        ({"device": "cuda:0,cuda:0"}, "twice"),
        ({"port": 65536}, "65535"),
        ({"max_array_bytes": 0}, "greater than or equal to 1"),
        ({"max_attempts": 0}, "greater than or equal to 1"),
        ({"default_ttl_s": 0}, "greater than 0"),
        ({"durability": "none at all"}, "'process', 'power' or 'replicated'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        Settings(**fields)


def number_settings() -> list[str]:
    return [name for name, field in Settings.model_fields.items() if "float" in str(field.annotation)]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("name", number_settings())
def test_no_number_is_infinite(monkeypatch, name, value):
    monkeypatch.setenv(f"GEMMSERVE_{name.upper()}", value)
    with pytest.raises(ValidationError, match="finite number"):
        Settings()
    with pytest.raises(ValidationError, match="finite number"):
        Settings(**{name: float(value)})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback(host):
    assert Settings(host=host).loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback(host):
    assert not Settings(host=host).loopback


def test_immutable():
    with pytest.raises(ValidationError):
        Settings().port = 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1000", 1000), ("1k", 1024), ("512MiB", 512 << 20), ("1G", 1 << 30), ("1.5 GB", 3 << 29), ("2TiB", 2 << 40)],
)
def test_sizes_have_units(monkeypatch, text, nbytes):
    assert parse_size(text) == nbytes
    monkeypatch.setenv("GEMMSERVE_MAX_ARRAY_BYTES", text)
    assert Settings(max_store_bytes=text).max_array_bytes == nbytes
    assert Settings(max_store_bytes=text).max_store_bytes == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1X", "G", "1e9", "0x10", "1 2", "nan"])
def test_no_sizes(text):
    with pytest.raises(ValidationError, match="is no number of bytes"):
        Settings(max_array_bytes=text)


def test_every_setting_in_bytes_reads_sizes():
    for name in Settings.model_fields:
        if name.endswith("_bytes"):
            assert getattr(Settings(**{name: "2M"}), name) == 2 << 20, name
    assert Settings(min_body_rate="2K").min_body_rate == 2048
