"""What cgshim says where a backend, a framework or the metadata is missing, or a third party's plug-in
is broken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import cgshim
from cgshim._registry import entry_points

CALL = """
import numpy, cgshim
square = cgshim.op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * x))
try:
    print(square(numpy.array([2.0, 3.0])))
except cgshim.BackendError as error:
    print(error)
"""
CHOOSE = """
import cgshim
try:
    cgshim.set_backend({name!r})
except cgshim.BackendError as error:
    print(error)
"""
OTHERS = [name for name in entry_points() if name != "numpy"]


def test_unknown_backend(python, backend: str) -> None:
    installed = ", ".join(cgshim.available_backends())
    missing = [
        f"{n} (pip install 'cgshim[{n}]')"
        for n in entry_points()
        if n not in cgshim.available_backends()
    ]
    could = f"; could be installed: {', '.join(missing)}" if missing else ""
    assert python("-c", CALL, CGSHIM_BACKEND="pytorch").stdout == (
        f"cgshim: a backend is named by its framework's import root, got 'pytorch'; installed: {installed}{could}\n"
    )
    assert backend in installed


def test_unknown_backend_where_little_is_installed(python, site_without) -> None:
    path = site_without(*OTHERS)
    could = ", ".join(f"{name} (pip install 'cgshim[{name}]')" for name in OTHERS)
    found = python("-S", "-c", CALL, path=path, CGSHIM_BACKEND="pytorch").stdout
    assert found == (
        "cgshim: a backend is named by its framework's import root, got 'pytorch'; "
        f"installed: numpy; could be installed: {could}\n"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_missing_framework(python, site_without, name: str) -> None:
    path = site_without(*OTHERS)
    assert python("-S", "-c", CHOOSE.format(name=name), path=path).stdout == (
        f"cgshim: the backend {name!r} of cgshim must import, got ModuleNotFoundError: No module named {name!r}; "
        f"pip install 'cgshim[{name}]'\n"
    )


NUMPYS_GRADIENT = f"""{CALL}
try:
    print(cgshim.op_grad(square)(numpy.array(3.0)))
except cgshim.BackendError as error:
    print(error)
"""
BY_AUTOGRAD = """
import autograd, cgshim
square = cgshim.op_custom_gradient(lambda x: (x * x, lambda upstream: 7.0 * upstream * x))
try:
    print(autograd.grad(lambda x: square(x) + square(1.0))(3.0))
except cgshim.BackendError as error:
    print(error)
"""
OLD = "cgshim: derivatives on NumPy need autograd 1.7 or later, got autograd 1.6.2; pip install 'autograd>=1.7'\n"


def test_missing_autograd(python, site_without) -> None:
    """Values need none."""
    result = python("-S", "-c", NUMPYS_GRADIENT, path=site_without("autograd*"))
    assert result.stdout == (
        "[4. 9.]\n"
        "cgshim: derivatives on NumPy need autograd 1.7 or later, got no autograd; pip install 'autograd>=1.7'\n"
    ), result.stderr


def test_old_autograd(python, site_without) -> None:
    """Values may be had beside it, imported or not."""
    path = site_without("autograd-*")
    metadata = path[0] / "autograd-1.6.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: autograd\nVersion: 1.6.2\n")
    assert python("-S", "-c", NUMPYS_GRADIENT, path=path).stdout == f"[4. 9.]\n{OLD}"
    assert (
        python("-S", "-c", f"import autograd.numpy{NUMPYS_GRADIENT}", path=path).stdout
        == f"[4. 9.]\n{OLD}"
    )
    assert python("-S", "-c", BY_AUTOGRAD, path=path).stdout == OLD


def test_missing_metadata(python, site_without) -> None:
    path = site_without("cgshim*.dist-info")
    for code, chosen in ((CALL, "numpy"), (CHOOSE.format(name="numpy"), "numpy"), (CALL, "")):
        found = python("-S", "-c", code, path=path, CGSHIM_BACKEND=chosen).stdout
        assert found == (
            "cgshim: backends are found by the metadata of installed distributions, got none at all; "
            "run pip install -e . (or pip install cgshim) in this environment\n"
        )


def test_a_framework_that_is_barred_is_not_available(python) -> None:
    """As whoever wants no import of it does it."""
    code = f"import cgshim, sys\nsys.modules.update(dict.fromkeys({OTHERS}))\nprint(cgshim.available_backends())"
    assert python("-c", code).stdout == "['numpy']\n"


# --- A third party's plug-in -------------------------------------------------------------------------


@pytest.fixture
def plug_in(tmp_path: Path):
    """Install a distribution that registers a framework called tiny, with this plug-in module."""

    def install(module: str, framework: str | None = "") -> Path:
        site = tmp_path / "third_parties"
        metadata = site / "tiny_plugin-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n"
        )
        (metadata / "entry_points.txt").write_text("[cgshim.backends]\ntiny = tiny_plugin\n")
        (site / "tiny_plugin.py").write_text(module)
        if framework is not None:
            (site / "tiny.py").write_text(framework)
        return site

    return install


BROKEN = {
    "it raises": (
        "raise RuntimeError('built for another version')",
        "RuntimeError: built for another version",
    ),
    "an import fails": (
        "import tiny_kernels",
        "ModuleNotFoundError: No module named 'tiny_kernels'",
    ),
    "a name is missing": (
        "from tiny import Tensor",
        "ImportError: cannot import name 'Tensor' from 'tiny' ({site}/tiny.py)",
    ),
}


@pytest.mark.parametrize(("module", "what"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_plug_in(python, plug_in, module: str, what: str) -> None:
    site = plug_in(module)
    assert python("-c", CHOOSE.format(name="tiny"), path=(site,)).stdout == (
        f"cgshim: the backend 'tiny' of tiny-plugin must import, got {what.format(site=site)}; "
        "fix or uninstall tiny-plugin, and restart Python\n"
    )


def test_plug_in_without_its_framework(python, plug_in) -> None:
    site = plug_in("import tiny", framework=None)
    assert python("-c", CHOOSE.format(name="tiny"), path=(site,)).stdout == (
        "cgshim: the backend 'tiny' of tiny-plugin must import, got ModuleNotFoundError: No module named 'tiny'; "
        "install what is imported as tiny\n"
    )


@pytest.mark.parametrize("imported", ["", "import tiny"], ids=["not imported", "imported"])
def test_a_broken_plug_in_leaves_the_others_working(python, plug_in, imported: str) -> None:
    """Nor does it where its framework is imported, and a call holds no tensor at all."""
    site = plug_in("raise RuntimeError('built for another version')")
    code = f"{imported}\n{CALL}\nprint(square(3.0), cgshim.available_backends())"
    available = sorted([*cgshim.available_backends(), "tiny"])
    result = python("-c", code, path=(site,))
    assert (result.stdout, result.stderr) == (f"[4. 9.]\n9.0 {available}\n", "")
