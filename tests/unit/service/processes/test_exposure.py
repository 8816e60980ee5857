"""What a server that others can reach must have, and certificates that cannot be used."""

from __future__ import annotations

import json
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from gemmserve_kernels.planning.rates import shipped
from gemmserve_service.processes.supervisor import _check_certificate, _check_probe, check_keys
from gemmserve_service.runtime.start_error import StartError, UsageError
from gemmserve_service.settings import Settings
from gemmserve_service.tenancy.keyring import FILE, create_key, revoke_key


def test_beyond_loopback_with_a_key(tmp_path):
    settings = Settings(host="0.0.0.0", data_dir=tmp_path)
    with pytest.raises(UsageError, match="gemmserve keys create"):
        check_keys(settings)
    check_keys(Settings(host="127.0.0.1", data_dir=tmp_path))
    check_keys(Settings(host="0.0.0.0", data_dir=tmp_path, allow_unauthenticated=True))
    key_id, _ = create_key(tmp_path, "alice")
    check_keys(settings)
    revoke_key(tmp_path, key_id)  # then it lets nobody in, which is no reason not to listen
    check_keys(settings)


def test_what_travels_in_clear_text_is_said(tmp_path, pair, capsys):
    """Unless there is TLS, here or at a proxy, or nobody else can listen on the way."""
    create_key(tmp_path, "alice")
    check_keys(Settings(host="0.0.0.0", data_dir=tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    for word in (
        "keys and arrays travel in clear text",
        "0.0.0.0",
        "--tls-certificate",
        "--tls-key",
        "--trusted-proxies",
    ):
        assert word in line
    quiet = [
        {"host": "127.0.0.1"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "tls_certificate": pair / "certificate", "tls_key": pair / "key"},
        {"host": "0.0.0.0", "trusted_proxies": "10.0.0.7"},
        {"host": "0.0.0.0", "data_dir": tmp_path / "without keys", "allow_unauthenticated": True},
    ]
    for fields in quiet:
        check_keys(Settings(**{"data_dir": tmp_path} | fields))
    assert capsys.readouterr().err == ""


def test_keys_that_cannot_be_read_are_no_keys(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(StartError, match=FILE):
        check_keys(Settings(host="0.0.0.0", data_dir=tmp_path))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tls_certificate": "x.pem"}, "belong together"),
        ({"tls_key": "x.pem"}, "belong together"),
        ({"trusted_proxies": "10.0.0.0/8,proxy.example"}, "proxy.example"),
        ({"min_body_rate": -1}, "greater than or equal to 0"),
        ({"max_head_bytes": 10}, "greater than or equal to 1024"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, reason):
    with pytest.raises(ValidationError, match=reason):
        Settings(**fields)


def test_proxies_are_addresses_and_networks():
    assert Settings(trusted_proxies="127.0.0.1, 10.0.0.0/8,fd00::/8").trusted_proxies == [
        "127.0.0.1",
        "10.0.0.0/8",
        "fd00::/8",
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A certificate, its key, another key, and the key under a passphrase."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("pair")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-pkeyopt", "ec_paramgen_curve:prime256v1")
    openssl(
        "req", "-x509", "-newkey", "ec", *curve, "-nodes", "-subj", "/CN=x", "-keyout", "key", "-out", "certificate"
    )
    openssl("genpkey", "-algorithm", "EC", *curve, "-out", "other")
    openssl("pkcs8", "-topk8", "-in", "key", "-passout", "pass:secret", "-out", "locked")
    return folder


def test_a_pair_is_taken(pair):
    _check_certificate(SimpleNamespace(tls_certificate=pair / "certificate", tls_key=pair / "key"))
    _check_certificate(SimpleNamespace(tls_certificate=None, tls_key=None))


@pytest.mark.parametrize(
    ("certificate", "key"),
    [("certificate", "other"), ("certificate", "certificate"), ("key", "key"), ("certificate", "missing"),
     ("certificate", "locked")],
)  # fmt: skip
def test_what_is_no_pair_is_said_at_once(pair, certificate, key):
    with pytest.raises(StartError, match=rf"certificate .*{certificate} and the key .*{key} cannot be used"):
        _check_certificate(SimpleNamespace(tls_certificate=pair / certificate, tls_key=pair / key))


def test_a_probe_that_cannot_be_used_is_told_before_anything_starts(tmp_path):
    file = tmp_path / "probe.json"
    with pytest.raises(StartError, match="No such file"):
        _check_probe(SimpleNamespace(probe_file=file))
    file.write_text("{}")
    with pytest.raises(StartError, match="no rates of a host"):
        _check_probe(SimpleNamespace(probe_file=file))
    file.write_text(json.dumps(shipped().document()))
    _check_probe(SimpleNamespace(probe_file=file))
    _check_probe(SimpleNamespace(probe_file=None))
