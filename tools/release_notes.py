"""python release_notes.py VERSION: print CHANGELOG.md's notes of a version; fail if it cannot be
released from here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn


def notes(changelog: str, version: str) -> str:
    """Return the section of a version, without its heading (`## 1.2.0` or `## 1.2.0 - 2026-11-22`)."""
    _, *parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)
    sections = {
        heading.split()[0]: text.strip()
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    }
    if not sections.get(version):
        refuse(
            f"CHANGELOG.md must have notes of version {version}",
            got=f"sections of {', '.join(sections)}",
            do=f"write them under ## {version}",
        )
    return sections[version]


def require_releasable(checkout: Path, version: str) -> None:
    """Exit if the version has a tag already, or if a file is not committed."""
    if tag := git(checkout, "tag", "--list", f"v{version}"):
        refuse(
            "a version is released once",
            got=f"the tag {tag}",
            do="raise the version in pyproject.toml",
        )
    if changes := git(checkout, "status", "--porcelain"):
        refuse("all files must be committed", got=changes.splitlines()[0], do="commit them")


def git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        refuse("it needs a git checkout", got=done.stderr.strip(), do="run it in one")
    return done.stdout.strip()


def refuse(must: str, *, got: str, do: str) -> NoReturn:
    sys.exit(f"release: {must}, got {got}; {do}")


if __name__ == "__main__":
    require_releasable(Path.cwd(), sys.argv[1])
    print(notes(Path("CHANGELOG.md").read_text(), sys.argv[1]))
