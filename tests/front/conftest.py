"""Pythons of their own, for what has to be seen from outside; and distributions of third parties, for
one test.
"""

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
from cgshim import _registry as registry
from cgshim._registry import load

SITE = Path(np.__file__).parents[1]
Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def python() -> Python:
    """Run a Python with some options, with more on its path and in its environment."""

    def run(
        *options: str, path: tuple[Path, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        environ = {key: value for key, value in os.environ.items() if key != "CGSHIM_BACKEND"}
        environ |= {"PYTHONPATH": os.pathsep.join(map(str, path)), **environment}
        return subprocess.run(
            [sys.executable, *options],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture
def site_without(tmp_path: Path) -> Callable[..., tuple[Path, ...]]:
    """A path for `python -S` on which everything is found that is installed here, except what is
    named.
    """

    def links(*patterns: str) -> tuple[Path, ...]:
        site = tmp_path / "site"
        site.mkdir()
        for entry in SITE.iterdir():
            if not any(fnmatch(entry.name, pattern) for pattern in patterns):
                (site / entry.name).symlink_to(entry)
        sources = [Path(cgshim.__file__).parents[1], Path(load("numpy").__file__).parents[1]]  # type: ignore[attr-defined]
        return (site, *(source for source in sources if source != SITE))

    return links


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`install(framework, entry_point, module)`: a distribution <framework>-plugin, with that
    module as its plug-in.
    """
    modules = set(sys.modules)

    def install_it(framework: str, entry_point: str, module: str) -> None:
        metadata = tmp_path / f"{framework}_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {framework}-plugin\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text(
            f"[cgshim.backends]\n{framework} = {entry_point}\n"
        )
        (tmp_path / f"{framework}_plugin.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
        registry.entry_points.cache_clear()
        registry.aliases.cache_clear()
        monkeypatch.setattr(registry, "_backends", dict(registry._backends))
        monkeypatch.setattr(registry, "_failures", {})

    yield install_it
    registry.entry_points.cache_clear()
    registry.aliases.cache_clear()
    for name in set(sys.modules) - modules:
        if name.endswith("_plugin"):
            del sys.modules[name]
