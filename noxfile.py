"""`nox` runs what CI runs; `nox -l` lists the other sessions."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

# without bytecode of its own TensorFlow takes 11 s to import instead of 5
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.sessions = ["tests", "tests_all", "lint", "docs", "package"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

FRAMEWORKS = {
    "numpy": ["scikit-learn"],
    "jax": ["jax", "equinox", "flax", "flatbuffers", "keras", "scikit-learn"],
    "torch": ["torch", "keras", "scikit-learn"],
    "tensorflow": ["tensorflow-cpu", "keras", "scikit-learn"],
}
ALL = [name for needed in FRAMEWORKS.values() for name in needed]
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]

SETTINGS = {
    "OMP_NUM_THREADS": "1",  # test processes share the cores
    # XLA's fusion emitters (jaxlib 0.10) take twice as long to compile
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def install(session: nox.Session, *args: str) -> None:
    """Install pinned versions by uv, or by pip where uv fails. pip knows which build of torch."""
    pinned = ["-c", "constraints.txt"]
    if "torch" in args:
        session.install("--no-compile", *pinned, "torch")
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", f"{session.bin}/python"]
    try:
        session.run_install(*uv, *pinned, *args, external=True)
    except CommandFailed:
        session.install("--no-compile", *pinned, *args)


def run_tests(session: nox.Session, backends: list[str], *options: str) -> None:
    """Run pytest on these backends. A backend that does not import fails the session."""
    chosen = [word for backend in backends for word in ("--backend", backend)]
    settings = {**SETTINGS, "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir / "jax")}
    # in the order of files: a process finds what its earlier tests have compiled
    parallel = ["-n", "2", "--dist", "worksteal"]
    # JAX 0.10 does not lock its cache
    half_written = ["-W", "ignore:Error reading persistent compilation cache"]
    command = ["pytest", "-q", *parallel, *half_written, *chosen, *options, *session.posargs]
    session.run(*command, env=settings)


def session_of_each(name: str, values: list[str]) -> Callable[[Callable[..., None]], object]:
    """Make a session for each value, which `nox -s "session(value)"` runs."""
    return lambda function: nox.session(nox.parametrize(name, values, ids=values)(function))


@session_of_each("backend", list(FRAMEWORKS))
def tests(session: nox.Session, backend: str) -> None:
    """Test one backend, where no other framework is installed."""
    install(session, "-e", ".", *GROUPS["test"], *FRAMEWORKS[backend])
    run_tests(session, [backend], "tests")


@nox.session
def tests_all(session: nox.Session) -> None:
    """Test all backends in one process: dispatch by type, mixed frameworks."""
    install(session, "-e", ".", *GROUPS["test"], *ALL)
    of_several = [f"tests/front/test_{name}.py" for name in ("choosing", "dtypes", "imports")]
    run_tests(session, list(FRAMEWORKS), *of_several, "tests/together")


@session_of_each("backend", ["jax", "torch"])
def gpu(session: nox.Session, backend: str) -> None:
    """Run the tests that need a GPU. Other sessions count them as not run."""
    framework = {"jax": "jax[cuda13]", "torch": "torch"}[backend]
    install(session, "-e", ".", *GROUPS["test"], framework)
    options = ["--backend", backend, "--gpu-device", "cuda"]
    session.run("pytest", "-q", *options, "tests/gpu", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, mypy and pyright."""
    install(session, "-e", ".", *GROUPS["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    with ThreadPoolExecutor() as pool:
        list(pool.map(session.run, ["mypy", "pyright"]))


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site in site/. A broken link, anchor or reference fails."""
    install(session, "-e", ".", *GROUPS["docs"])
    shutil.rmtree("site", ignore_errors=True)
    options = ["-q", "--fail-on-warning", "-c", "docs", "-d", session.create_tmp()]
    session.run("sphinx-build", *options, ".", "site")
    session.run("python", "tools/overflow.py", "site")


@nox.session
def package(session: nox.Session) -> None:
    """Build dist/, and test the wheel in the unpacked sdist."""
    install(session, "build", "twine", "check-wheel-contents", *GROUPS["test"])
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    [wheel], [sdist] = Path("dist").glob("*.whl"), Path("dist").glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.run("check-wheel-contents", str(wheel))
    install(session, "--force-reinstall", str(wheel))
    folder = session.create_tmp()
    shutil.unpack_archive(sdist, folder, filter="data")
    unpacked = Path(folder, sdist.name.removesuffix(".tar.gz"))
    shutil.rmtree(unpacked / "cgshim")  # so that all imports are of the wheel
    session.chdir(unpacked)
    session.run("python", "examples/log1pexp.py")
    session.run("python", "-m", "cgshim", "--require", "numpy")
    session.run("pytest", "-q", "--backend", "numpy", "tests/front/test_environment.py")


@session_of_each("page", ["ops", "transformations"])
def pages(session: nox.Session, page: str) -> None:
    """Write docs/ops.md or docs/transformations.md from runs on every backend."""
    install(session, "-e", ".", *ALL)
    session.run("python", f"tools/write_{page}.py")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure every backend beside code by hand, and write docs/performance.md."""
    install(session, "-e", ".", *ALL)
    session.run("python", "-m", "benchmarks", *session.posargs)


@session_of_each("name", ["mlx", "tinygrad"])
def third_party(session: nox.Session, name: str) -> None:
    """Test a third-party backend of examples/."""
    framework = {"mlx": "mlx[cpu]", "tinygrad": "tinygrad"}[name]
    install(session, "-e", ".", *GROUPS["test"], framework)
    session.install("--no-deps", f"examples/cgshim-{name}")
    session.run("pytest", "-q", f"examples/cgshim-{name}")


@session_of_each("library", ["pennylane", "pot", "tensorcircuit", "cvxpylayers", "geomstats"])
def adopted(session: nox.Session, library: str) -> None:
    """Compare a library with itself, with its gradients replaced by examples/adopted/."""
    install(session, "torch")  # as it is tested; the libraries need older versions of the others
    session.install("-e", ".", "-r", f"examples/adopted/{library}/requirements.txt")
    folder = session.create_tmp()
    session.run("python", f"examples/adopted/{library}/run.py", folder, *session.posargs)
