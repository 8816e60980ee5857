"""Makes a release of what is committed: `python tools/release.py`, or `make release`.

Without arguments it says whether the commit could be released, builds it twice, and leaves nothing: a dry run. With
`--key KEY` it leaves wheel, sdist, SHA256SUMS and SHA256SUMS.sig in `--out`, and makes the signed tag. It sends nothing
anywhere: the commands that do are printed.

The version is that of the newest section of CHANGELOG.md; pyproject.toml has to agree, everything else (`__version__`,
the OpenAPI document, images) reads it from the installed wheel. Archives have the commit's time as theirs
(SOURCE_DATE_EPOCH): whoever builds the tag again with the same hatchling gets the same bytes.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
SIGNERS = "SIGNERS"
"""Public keys of those who release, in the format of ssh-keygen's ALLOWED SIGNERS; part of the tree."""
NAMESPACE = "gemmserve-release"
"""What a signature is for: one made by the same key for anything else is not taken for it."""
SUMS = "SHA256SUMS"

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?")
_SECTION = re.compile(
    r"^## (?P<name>\S+)(?: - (?P<date>\S+))?[^\n]*\n(?P<text>.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)


class RefusedError(Exception):
    """The commit cannot be released as it is; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Release:
    """A version, what the changelog says of it, and the time of its commit in seconds since 1970."""

    version: str
    notes: str
    epoch: int

    @property
    def tag(self) -> str:
        """Name of its git tag."""
        return f"v{self.version}"


def output(command: Sequence[str], root: Path, **environment: str) -> str:
    """Run a command in `root`; return its standard output. Raises RefusedError with what it said where it fails."""
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RefusedError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def newest_section(changelog: str) -> tuple[str, str]:
    """Return version and text of the newest section below Unreleased. Raises RefusedError."""
    sections = list(_SECTION.finditer(changelog))
    if not sections or sections[0]["name"] != "Unreleased":
        raise RefusedError("CHANGELOG.md does not begin with a section Unreleased")
    if sections[0]["text"].strip():
        raise RefusedError("CHANGELOG.md has entries under Unreleased: move them below a heading `## VERSION - DATE`")
    if len(sections) < 2:
        raise RefusedError("CHANGELOG.md has no section of a version: it is a heading `## VERSION - DATE`")
    newest = sections[1]
    try:
        dt.date.fromisoformat(newest["date"] or "")
    except ValueError:
        raise RefusedError(f"CHANGELOG.md: the section of {newest['name']} has no date (YYYY-MM-DD)") from None
    if not newest["text"].strip():
        raise RefusedError(f"CHANGELOG.md says nothing of {newest['name']}")
    rank = _rank(newest["name"])
    for older in sections[2:]:
        if _rank(older["name"]) >= rank:
            raise RefusedError(f"CHANGELOG.md: {newest['name']} does not follow {older['name']}")
    return newest["name"], newest["text"].strip() + "\n"


def _rank(version: str) -> tuple[float, ...]:
    """A version for comparison. Raises RefusedError for what is none."""
    match = _VERSION.fullmatch(version)
    if match is None:
        raise RefusedError(f"{version} is no version: MAJOR.MINOR.PATCH, with rcN for a candidate")
    *numbers, candidate = match.groups()
    return (*map(float, numbers), float(candidate or "inf"))


def examine(root: Path) -> Release:
    """Return what the commit in `root` would be released as. Raises RefusedError."""
    if dirt := output(["git", "status", "--porcelain"], root):
        raise RefusedError(f"the tree is not what is committed:\n{dirt}")
    version, notes = newest_section((root / "CHANGELOG.md").read_text("utf-8"))
    declared = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if declared != version:
        raise RefusedError(f"pyproject.toml says {declared}, the changelog {version}")
    locked = re.search(r"^hatchling==(\S+)", (root / "deploy" / "locks" / "build.txt").read_text("utf-8"), re.MULTILINE)
    if locked is None or locked[1] != metadata.version("hatchling"):
        raise RefusedError(
            f"hatchling is {metadata.version('hatchling')}, deploy/locks/build.txt has "
            f"{locked[1] if locked else 'none'}: other bytes than those of whoever builds it again"
        )
    release = Release(version, notes, int(output(["git", "log", "-1", "--format=%ct"], root)))
    if output(["git", "tag", "--list", release.tag], root):
        raise RefusedError(f"there is a tag {release.tag} already")
    return release


def build(root: Path, epoch: int, folder: Path, umask: int) -> dict[str, bytes]:
    """Return sdist, and the wheel made from it, by their names, from an export of git's index into the new `folder`.

    Raises RefusedError.
    """
    tree, dist = folder / "tree", folder / "dist"
    before = os.umask(umask)
    try:
        output(["git", "checkout-index", "--all", f"--prefix={tree}/"], root)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
        output(command, tree, SOURCE_DATE_EPOCH=str(epoch))
    finally:
        os.umask(before)
    return {path.name: path.read_bytes() for path in sorted(dist.iterdir())}


def build_twice(root: Path, release: Release) -> dict[str, bytes]:
    """Return the artifacts by name, after two builds in other folders and under other umasks. Raises RefusedError."""
    with (
        tempfile.TemporaryDirectory(prefix="release-") as first,
        tempfile.TemporaryDirectory(prefix="again-") as second,
    ):
        files = build(root, release.epoch, Path(first) / "a", 0o022)
        again = build(root, release.epoch, Path(second) / "another" / "folder", 0o077)
    if differ := [name for name in files.keys() | again.keys() if files.get(name) != again.get(name)]:
        raise RefusedError(f"two builds of one commit differ: {', '.join(sorted(differ))}")
    return files


def check_wheel(files: Mapping[str, bytes], version: str, folder: Path) -> None:
    """Raise RefusedError unless there are a sdist and a wheel of that version, which has its bill of materials."""
    expected = {f"gemmserve-{version}.tar.gz", f"gemmserve-{version}-py3-none-any.whl"}
    if set(files) != expected:
        raise RefusedError(f"the build made {sorted(files)}, and not {sorted(expected)}")
    path = folder / f"gemmserve-{version}-py3-none-any.whl"
    path.write_bytes(files[path.name])
    with zipfile.ZipFile(path) as wheel:
        info = f"gemmserve-{version}.dist-info"
        says = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())["Version"]
        if says != version or f"{info}/sboms/gemmserve.cdx.json" not in wheel.namelist():
            raise RefusedError(f"{path.name} says that it is {says}, or has no bill of materials")
        wheel.extractall(folder)
    printed = output([sys.executable, "-m", "gemmserve.cli", "--version"], folder, PYTHONPATH=str(folder)).split()[-1]
    if printed != version:
        raise RefusedError(f"gemmserve --version says {printed}")


def sums(files: Mapping[str, bytes]) -> str:
    """Return the checksums as sha256sum writes and checks them."""
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))


def sign(path: Path, key: Path, signers: Path) -> str:
    """Sign a file by an SSH key (beside it, `.sig`); return who `signers` says it is. Raises RefusedError.

    What cannot be verified by `signers` is not left behind.
    """
    signature = path.with_name(path.name + ".sig")
    signature.unlink(missing_ok=True)
    output(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(path)], path.parent)
    try:
        return verify(path, signature, signers)
    except RefusedError:
        signature.unlink()
        raise


def verify(path: Path, signature: Path, signers: Path) -> str:
    """Return who signed the file, one of `signers`. Raises RefusedError."""
    find = ["ssh-keygen", "-Y", "find-principals", "-s", str(signature), "-f", str(signers)]
    signer = output(find, path.parent).split("\n")[0]
    check = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", signer, "-n", NAMESPACE, "-s", str(signature)]
    done = subprocess.run(check, input=path.read_bytes(), capture_output=True, check=False)
    if done.returncode:
        raise RefusedError(
            f"{signature.name} is no signature of {path.name}: {done.stderr.decode()}{done.stdout.decode()}"
        )
    return signer


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="release", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--key", type=Path, help="SSH key to sign with (its public half where an agent has it)")
    parser.add_argument("--out", type=Path, default=root / "dist", help="an empty or new folder; default: dist")
    options = parser.parse_args(arguments)
    try:
        release = examine(root)
        print(f"{release.tag}\n\n{release.notes}")
        files = build_twice(root, release)
        with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
            check_wheel(files, release.version, Path(folder))
        print(sums(files))
        if options.key is None:
            print("a dry run: nothing was kept, signed or tagged; --key KEY does it")
            return 0
        leave(root, release, files, options.out, options.key)
    except RefusedError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def leave(root: Path, release: Release, files: Mapping[str, bytes], out: Path, key: Path) -> None:
    """Write the files, their checksums and the signature into `out`, and make the tag. Raises RefusedError."""
    if out.exists() and any(out.iterdir()):
        raise RefusedError(f"{out} is not empty")
    if not (root / SIGNERS).is_file():
        raise RefusedError(f"{SIGNERS} is missing: the public keys by which users verify")
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMS).write_text(sums(files), "utf-8")
    try:
        signer = sign(out / SUMS, key, root / SIGNERS)
    except RefusedError:
        (out / SUMS).unlink()
        raise
    for name, data in files.items():
        (out / name).write_bytes(data)
    ssh = ["-c", "gpg.format=ssh", "-c", f"user.signingkey={key}"]
    message = f"gemmserve {release.version}\n\n{release.notes}"
    output(["git", *ssh, "tag", "--sign", "--cleanup=verbatim", "--message", message, release.tag], root)
    print(f"{out}: signed by {signer}; tag {release.tag} made. What is left:")
    print(f"  git push origin {release.tag}")
    print(f"  python -m twine upload {out}/*.whl {out}/*.tar.gz")


if __name__ == "__main__":
    sys.exit(main())
