"""tools/release.py on a small project of its own; that the whole project builds to the same bytes twice."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from functools import partial
from importlib import metadata
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = """# Changelog

## Unreleased

## 1.2.0 - 2026-11-23

### Added

- Things.

## 1.1.0 - 2026-10-01

- Old.
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "gemmserve"
version = "1.2.0"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["numpy>=2"]
[tool.hatch.build.targets.wheel]
packages = ["gemmserve"]
[tool.hatch.build.targets.wheel.hooks.custom]
"""

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    module = sys.modules["release"] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def git(root, *arguments: str) -> str:
    identity = ("-c", "user.name=Tester", "-c", "user.email=tester@example.org")
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def commit(root) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "all")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project that can be released: all that the tool looks at, and a command that knows its version."""
    root = tmp_path / "project"
    for name, text in {
        "pyproject.toml": PROJECT,
        "CHANGELOG.md": CHANGES,
        "SIGNERS": "",
        "deploy/locks/build.txt": f"hatchling=={metadata.version('hatchling')} \\\n    --hash=sha256:00\n",
        "gemmserve/__init__.py": "",
        "gemmserve/cli.py": "from importlib.metadata import version\nprint('gemmserve', version('gemmserve'))\n",
        "hatch_build.py": (ROOT / "hatch_build.py").read_text(),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    git(tmp_path, "init", "--quiet", "project")
    commit(root)
    for variable in ("GIT_AUTHOR", "GIT_COMMITTER"):
        monkeypatch.setenv(f"{variable}_NAME", "Tester")
        monkeypatch.setenv(f"{variable}_EMAIL", "tester@example.org")
    return root


@pytest.fixture
def key(tmp_path, project):
    """A throw-away key, whose public half is among the project's signers."""
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    public = path.with_suffix(".pub").read_text()
    (project / "SIGNERS").write_text(f'tester@example.org namespaces="gemmserve-release,git" {public}')
    commit(project)
    return path


REFUSED = {
    "a changed file": ({"gemmserve/__init__.py": "x = 1\n"}, False, "not what is committed"),
    "a new file": ({"gemmserve/new.py": ""}, False, "not what is committed"),
    "entries that are not in a version": (
        {"CHANGELOG.md": CHANGES.replace("Unreleased\n", "Unreleased\n\n- New.\n")}, True, "under Unreleased",
    ),
    "no version": ({"CHANGELOG.md": "# Changelog\n\n## Unreleased\n"}, True, "no section of a version"),
    "no Unreleased": ({"CHANGELOG.md": CHANGES.replace("## Unreleased\n", "")}, True, "does not begin"),
    "no date": ({"CHANGELOG.md": CHANGES.replace(" - 2026-11-23", "")}, True, "1.2.0 has no date"),
    "nothing to say": (
        {"CHANGELOG.md": CHANGES.replace("### Added\n\n- Things.\n\n", "")}, True, "says nothing of 1.2.0",
    ),
    "an older version": ({"CHANGELOG.md": CHANGES.replace("1.1.0", "1.10.0")}, True, "1.2.0 does not follow 1.10.0"),
    "no number": ({"CHANGELOG.md": CHANGES.replace("1.2.0", "next")}, True, "next is no version"),
    "another version in pyproject": (
        {"pyproject.toml": PROJECT.replace("1.2.0", "1.3.0")}, True, "pyproject.toml says 1.3.0, the changelog 1.2.0",
    ),
    "another builder": ({"deploy/locks/build.txt": "hatchling==0.1\n"}, True, "build.txt has 0.1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_ready_is_refused(release, project, capsys, case) -> None:
    files, committed, reason = REFUSED[case]
    for name, text in files.items():
        (project / name).write_text(text)
    if committed:
        commit(project)
    assert release.main([], project) == 1
    assert reason in capsys.readouterr().err


def test_a_version_that_has_its_tag_is_refused(release, project, capsys) -> None:
    git(project, "tag", "v1.2.0")
    assert release.main([], project) == 1
    assert "there is a tag v1.2.0 already" in capsys.readouterr().err


def test_a_candidate_comes_before_its_release(release) -> None:
    name, notes = release.newest_section(CHANGES.replace("1.1.0", "1.2.0rc1"))
    assert (name, notes) == ("1.2.0", "### Added\n\n- Things.\n")
    with pytest.raises(release.RefusedError, match="does not follow"):
        release.newest_section(CHANGES.replace("1.2.0", "1.1.0rc2"))


def test_a_dry_run_leaves_nothing(release, project, monkeypatch, tmp_path, capsys) -> None:
    once = partial(release.build, project, 0, tmp_path / "build", 0o022)
    monkeypatch.setattr(release, "build_twice", lambda root, found: once())
    before = sorted(project.rglob("*"))
    assert release.main([], project) == 0
    assert "- Things." in capsys.readouterr().out
    assert sorted(path for path in project.rglob("*") if ".git/" not in str(path)) == [
        path for path in before if ".git/" not in str(path)
    ]
    assert not git(project, "tag", "--list")
    assert not git(project, "status", "--porcelain")


def test_builds_that_differ_are_refused(release, project, capsys) -> None:
    hook = (project / "hatch_build.py").read_text()
    (project / "hatch_build.py").write_text(
        hook.replace('"version": 1,', '"version": time.time_ns(),') + "import time\n"
    )
    commit(project)
    assert release.main([], project) == 1
    assert "two builds of one commit differ: gemmserve-1.2.0-py3-none-any.whl\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("says", "prints", "bill", "reason"),
    [
        ("1.2.0", "1.1.0", True, "gemmserve --version says 1.1.0"),
        ("1.1.0", "1.2.0", True, "says that it is 1.1.0"),
        ("1.2.0", "1.2.0", False, "has no bill of materials"),
    ],
)
def test_a_wheel_that_is_not_what_it_should_be_is_refused(release, tmp_path, says, prints, bill, reason) -> None:
    data = BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        wheel.writestr("gemmserve-1.2.0.dist-info/METADATA", f"Name: gemmserve\nVersion: {says}\n")
        wheel.writestr("gemmserve/__init__.py", "")
        wheel.writestr("gemmserve/cli.py", f"print('gemmserve {prints}')\n")
        if bill:
            wheel.writestr("gemmserve-1.2.0.dist-info/sboms/gemmserve.cdx.json", "{}")
    files = {"gemmserve-1.2.0.tar.gz": b"", "gemmserve-1.2.0-py3-none-any.whl": data.getvalue()}
    with pytest.raises(release.RefusedError, match=reason):
        release.check_wheel(files, "1.2.0", tmp_path)
    with pytest.raises(release.RefusedError, match="made"):
        release.check_wheel({}, "1.2.0", tmp_path)


@needs_ssh
def test_a_release_is_signed_tagged_and_verified_as_documented(release, project, key, tmp_path) -> None:
    out = tmp_path / "out"
    assert release.main(["--key", str(key), "--out", str(out)], project) == 0
    wheel, sdist = "gemmserve-1.2.0-py3-none-any.whl", "gemmserve-1.2.0.tar.gz"
    assert {path.name for path in out.iterdir()} == {wheel, sdist, "SHA256SUMS", "SHA256SUMS.sig"}
    (lines,) = (line for line in (ROOT / "docs" / "versioning.md").read_text().split("```") if "-Y verify" in line)
    check = lines.removeprefix("sh\n").replace("maintainer@example.org", "tester@example.org")
    shutil.copy(project / "SIGNERS", out)
    verified = subprocess.run(["bash", "-euc", check], cwd=out, capture_output=True, text=True, check=False)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert f"{wheel}: OK" in verified.stdout

    allowed = ("-c", f"gpg.ssh.allowedSignersFile={project / 'SIGNERS'}")
    git(project, *allowed, "verify-tag", "v1.2.0")
    assert "### Added\n\n- Things." in git(project, "tag", "--list", "--format=%(contents)", "v1.2.0")
    epoch = int(git(project, "log", "-1", "--format=%ct"))
    with tarfile.open(out / sdist) as archive:
        assert {member.mtime for member in archive} == {epoch}

    for name in (wheel, "SHA256SUMS"):  # what somebody else has put there
        data = (out / name).read_bytes()
        (out / name).write_bytes(data.replace(b"0", b"1", 1))
        assert subprocess.run(["bash", "-euc", check], cwd=out, capture_output=True, check=False).returncode
        (out / name).write_bytes(data)


@needs_ssh
def test_a_key_that_users_do_not_have_signs_nothing(release, project, key, tmp_path) -> None:
    found = release.Release("1.2.0", "Things.", 0)
    (project / "SIGNERS").write_text("")
    with pytest.raises(release.RefusedError):
        release.leave(project, found, {"a.whl": b"a"}, tmp_path / "out", key)
    assert not list((tmp_path / "out").iterdir())
    assert not git(project, "tag", "--list")


@needs_ssh
def test_a_signature_for_something_else_is_none(release, project, key, tmp_path) -> None:
    path = tmp_path / "SHA256SUMS"
    path.write_text("0  a.whl\n")
    subprocess.run(["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", "git", path], check=True, capture_output=True)
    with pytest.raises(release.RefusedError, match="no signature"):
        release.verify(path, Path(f"{path}.sig"), project / "SIGNERS")


@needs_ssh
def test_what_is_there_is_not_overwritten(release, project, key, tmp_path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(release.RefusedError, match="not empty"):
        release.leave(project, release.Release("1.2.0", "Things.", 0), {"a.whl": b"a"}, tmp_path, key)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout of git")
def test_the_project_builds_to_the_same_bytes_twice(release) -> None:
    found = release.Release(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"], "", 1_700_000_000
    )
    files = release.build_twice(ROOT, found)
    (wheel,) = (data for name, data in files.items() if name.endswith(".whl"))
    with zipfile.ZipFile(BytesIO(wheel)) as archive:
        assert {entry.date_time[:3] for entry in archive.infolist()} == {(2023, 11, 14)}
        assert {entry.external_attr >> 16 & 0o777 for entry in archive.infolist()} <= {0o644, 0o755}
        (bill,) = (name for name in archive.namelist() if "/sboms/" in name)
        assert json.loads(archive.read(bill))["metadata"]["component"]["version"] == found.version


def test_the_project_has_one_version(root) -> None:
    from inline_executor import InlineExecutor

    from gemmserve_service.http.app import create_app
    from gemmserve_service.jobs.core import Core
    from gemmserve_service.settings import Settings

    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    settings = Settings()
    assert create_app(settings, Core(settings, InlineExecutor())).openapi()["info"]["version"] == declared
    assert metadata.version("gemmserve") == declared
    (root / "CHANGELOG.md").read_text().index("\n## Unreleased\n")
