"""Self-signed certificates for servers of tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_COMMAND = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
_OWN_AUTHORITY = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]


def make_certificate(
    folder: Path,
    *,
    name: str = "gemmserve",
    addresses: str = "IP:127.0.0.1",
    files: tuple[str, str] = ("cert.pem", "key.pem"),
) -> tuple[Path, Path]:
    """Make a certificate that is its own authority, and its key, in a folder; return their paths. `addresses`: a
    subjectAltName. Skips the test where there is no openssl.
    """
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    certificate, key = (folder / each for each in files)
    named = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={addresses}", *_OWN_AUTHORITY]
    to = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*_COMMAND.split(), *named, *to], check=True, capture_output=True)
    return certificate, key
