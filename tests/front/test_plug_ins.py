"""Backends of other distributions: one that fails is an error only where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from cgshim._protocol import REQUIRED

WORKS = "from cgshim_numpy import *\n"
METADATA = "Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n"

LOAD = """
import cgshim, numpy
for _ in range(2):
    try:
        cgshim.set_backend({name!r})
        print(cgshim.config_backend())
    except cgshim.BackendError as error:
        print(error)
cgshim.set_backend(None)
square = cgshim.op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x))
print(square(numpy.array([2.0, 3.0])))
"""


@pytest.fixture
def plug_in(tmp_path: Path):
    """Install a distribution that registers a backend, and a framework called tiny."""

    def install(module: str, backends: str = "tiny = tiny_plugin", aliases: str = "") -> Path:
        metadata = tmp_path / "tiny_plugin-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(METADATA)
        (metadata / "entry_points.txt").write_text(
            f"[cgshim.backends]\n{backends}\n[cgshim.aliases]\n{aliases}\n"
        )
        (tmp_path / "tiny_plugin.py").write_text(module)
        (tmp_path / "tiny.py").write_text("")
        return tmp_path

    return install


FAULTS = {
    "it raises": (
        "print('imported')\nraise RuntimeError('too old')",
        "must import, got RuntimeError: too old",
    ),
    "it ends Python": (
        "print('imported')\nraise SystemExit(3)",
        "must import, got SystemExit: 3",
    ),
    "its functions are missing": (
        "print('imported')",
        f"must have the functions of a backend, got no {', '.join(REQUIRED[:-1])} and {REQUIRED[-1]}",
    ),
}


@pytest.mark.parametrize(("module", "what"), FAULTS.values(), ids=FAULTS)
def test_backend_that_fails_is_imported_once_and_named(python, plug_in, module, what) -> None:
    message = (
        f"cgshim: the backend 'tiny' of tiny-plugin {what}; "
        "fix or uninstall tiny-plugin, and restart Python"
    )
    result = python("-c", LOAD.format(name="tiny"), path=(plug_in(module),))
    assert result.stdout == f"imported\n{message}\n{message}\n[4. 9.]\n", result.stderr


def test_the_command_names_a_backend_that_fails(python, plug_in) -> None:
    path = (plug_in("raise RuntimeError('too old')"),)
    result = python("-m", "cgshim", "tiny", "numpy", path=path)
    assert result.returncode == 1
    assert (
        "cgshim: the backend 'tiny' of tiny-plugin must import, got RuntimeError" in result.stdout
    )


def test_backend_that_works(python, plug_in) -> None:
    result = python("-c", LOAD.format(name="tiny"), path=(plug_in(WORKS),))
    assert result.stdout == "tiny\ntiny\n[4. 9.]\n", result.stderr


def test_names_that_no_other_distribution_takes(python, plug_in) -> None:
    """Those of cgshim's own backends, and those of Python's own modules."""
    path = (plug_in("print('imported')", "numpy = tiny_plugin\nbuiltins = tiny_plugin"),)
    result = python("-c", LOAD.format(name="numpy"), path=path)
    assert result.stdout == "numpy\nnumpy\n[4. 9.]\n", result.stderr


def test_interrupt_of_the_user(python, plug_in) -> None:
    path = (plug_in("raise KeyboardInterrupt"),)
    result = python("-c", LOAD.format(name="tiny"), path=path)
    assert "KeyboardInterrupt" in result.stderr
    assert result.returncode != 0
