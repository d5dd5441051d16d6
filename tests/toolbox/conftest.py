"""Strangers' distributions, installed for one test."""

import sys
from pathlib import Path

import pytest

from cgshim import _installed as installed
from cgshim import _registry as registry


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`install(framework, entry_point, module)`: a distribution <framework>-plugin, with that module as its plug-in."""
    modules = set(sys.modules)

    def install_it(framework: str, entry_point: str, module: str) -> None:
        metadata = tmp_path / f"{framework}_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {framework}-plugin\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[cgshim.backends]\n{framework} = {entry_point}\n")
        (tmp_path / f"{framework}_plugin.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
        installed.registered.cache_clear()
        monkeypatch.setattr(registry, "_backends", dict(registry._backends))
        monkeypatch.setattr(registry, "_failures", {})

    yield install_it
    installed.registered.cache_clear()
    for name in set(sys.modules) - modules:
        if name.endswith("_plugin"):
            del sys.modules[name]
