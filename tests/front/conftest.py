"""Pythons of their own, for what has to be seen from outside: imports, the environment, what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

import cgshim
from cgshim._registry import load

SITE = Path(np.__file__).parents[1]
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python() -> Python:
    """Run a Python with some options, with more on its path and in its environment."""

    def run(*options: str, path: tuple[Path, ...] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if key != "CGSHIM_BACKEND"}
        environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
        return subprocess.run(
            [sys.executable, *options], env=environ, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def site_without(tmp_path: Path) -> Callable[..., tuple[Path, ...]]:
    """A path for `python -S` on which everything is found that is installed here, except what is named."""

    def links(*patterns: str) -> tuple[Path, ...]:
        site = tmp_path / "site"
        site.mkdir()
        for entry in SITE.iterdir():
            if not any(fnmatch(entry.name, pattern) for pattern in patterns):
                (site / entry.name).symlink_to(entry)
        sources = [Path(cgshim.__file__).parents[1], Path(load("numpy").__file__).parents[1]]  # type: ignore[attr-defined]
        return (site, *(source for source in sources if source != SITE))

    return links
