"""`nox -s release` prints the version's notes, and refuses what cannot be released."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("release_notes.py")
CHANGELOG = """\
# Changelog

## Unreleased

## 1.10.0 - 2026-11-22

### Added

- Ten.

## 1.1.0

- One.
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-m", "All")
    return tmp_path


def git(checkout, *arguments):
    subprocess.run(["git", *arguments], cwd=checkout, check=True, capture_output=True)


def release(checkout, version):
    return subprocess.run(
        [sys.executable, SCRIPT, version], cwd=checkout, capture_output=True, text=True
    )


def refusal(checkout, version="1.10.0"):
    done = release(checkout, version)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize(
    ("version", "notes"), [("1.10.0", "### Added\n\n- Ten.\n"), ("1.1.0", "- One.\n")]
)
def test_notes(checkout, version, notes):
    assert release(checkout, version).stdout == notes


@pytest.mark.parametrize(
    "version", ["1.1", "10.0", "Unreleased"], ids=["a part", "another part", "an empty section"]
)
def test_no_notes(checkout, version):
    assert refusal(checkout, version) == (
        f"release: CHANGELOG.md must have notes of version {version}, "
        f"got sections of Unreleased, 1.10.0, 1.1.0; write them under ## {version}\n"
    )


def test_a_version_is_released_once(checkout):
    git(checkout, "tag", "v1.10.0")
    assert refusal(checkout) == (
        "release: a version is released once, got the tag v1.10.0; raise the version in pyproject.toml\n"
    )
    assert release(checkout, "1.1.0").returncode == 0


def test_all_is_committed(checkout):
    (checkout / "new.py").touch()
    assert refusal(checkout) == "release: all files must be committed, got ?? new.py; commit them\n"


def test_outside_of_git(tmp_path):
    assert refusal(tmp_path).startswith(
        "release: it needs a git checkout, got fatal: not a git repository"
    )
