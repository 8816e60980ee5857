"""Writes this machine's pip configuration for the inside of an image build: `pip_settings.py CONFIG CERTIFICATES`.

CONFIG gets index, proxy and time limits, from pip's files and variables; CERTIFICATES the authorities that pip trusts,
or nothing. Both reach the build as secrets (docker-compose.yml): no layer and no committed file names them. Indexes in
folders of this machine are left out, since the build does not see them.
"""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from pathlib import Path

TAKEN = ("index-url", "extra-index-url", "trusted-host", "proxy", "default-timeout", "timeout", "retries")
INSIDE = "/run/secrets/ca"  # where the Dockerfile mounts CERTIFICATES


def machine_settings() -> dict[str, str]:
    """Settings of pip by name; what a variable says wins over a file."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    return parse(listing.stdout)


def parse(listing: str) -> dict[str, str]:
    """The settings of `pip config list`'s output: lines such as global.index-url='...' and :env:.cert='...'."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.strip().rpartition(".")
        if section in found:
            found[section][name] = str(ast.literal_eval(value.strip()))
    return {**found["global"], **found["install"], **found[":env:"]}


def is_remote(url: str) -> bool:
    """Whether a build, which sees no folder of this machine, can reach it."""
    return url.startswith(("http://", "https://"))


def inside(settings: dict[str, str]) -> dict[str, str]:
    """The settings that hold inside the build."""
    kept = {name: value for name, value in settings.items() if name in TAKEN}
    for name in ("index-url", "extra-index-url"):
        urls = [url for url in kept.pop(name, "").split() if is_remote(url)]
        if urls:
            kept[name] = "\n".join(urls)
    if "cert" in settings:
        kept["cert"] = INSIDE
    return kept


def main() -> None:
    """Command line."""
    config, certificates = map(Path, sys.argv[1:])
    settings = machine_settings()
    writer = configparser.RawConfigParser()
    writer["global"] = inside(settings)
    config.touch(mode=0o600)  # an index's address may hold a password
    with config.open("w") as file:
        writer.write(file)
    certificates.write_bytes(Path(settings["cert"]).read_bytes() if "cert" in settings else b"")


if __name__ == "__main__":
    main()
