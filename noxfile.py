"""`nox` runs what CI runs; `nox -l` lists the rest."""

from __future__ import annotations

from pathlib import Path

import nox

nox.options.sessions = ["tests", "tests_all", "lint", "package"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# What the tests of a backend import, beside cgshim: its framework, and the libraries of its own world.
FRAMEWORKS = {
    "numpy": ["scikit-learn"],
    "jax": ["jax", "equinox", "flax", "flatbuffers", "keras", "scikit-learn"],
    "torch": ["torch", "keras", "scikit-learn"],
    "tensorflow": ["tensorflow-cpu", "keras", "scikit-learn"],
}
TEST = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test")
LINT = nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "lint")

# The oldest versions that pass, as pyproject.toml promises them. PyTorch's older CPU builds are not on PyPI.
OLDEST = {
    "numpy": ["numpy==1.26.*"],
    "jax": ["numpy==1.26.*", "jax==0.4.38", "jaxlib==0.4.38"],
    "tensorflow": ["numpy==1.26.*", "tensorflow-cpu==2.18.*"],
}


COMMON = ["tests/conformance", "tests/front", "tests/test_messages.py"]


def run_tests(session: nox.Session, backends: list[str], *paths: str) -> None:
    """The tests (by default all) of these backends; one that does not import fails the session."""
    chosen = [word for backend in backends for word in ("--backend", backend)]
    session.run("pytest", "-q", "-n", "2", *chosen, *paths, *session.posargs)


@nox.session
@nox.parametrize("backend", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def tests(session: nox.Session, backend: str) -> None:
    """All tests of one backend, where no other framework is installed."""
    session.install("-c", "constraints.txt", "-e", ".", *TEST, *FRAMEWORKS[backend])
    run_tests(session, [backend])


@nox.session
def tests_all(session: nox.Session) -> None:
    """All backends in one process: dispatch by type, mixed frameworks."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    session.install("-c", "constraints.txt", "-e", ".", *TEST, *frameworks)
    run_tests(session, list(FRAMEWORKS), *COMMON, "tests/together")


@nox.session(python=["3.10", "3.12", "3.13"])
@nox.parametrize("backend", list(OLDEST), ids=list(OLDEST))
def pythons(session: nox.Session, backend: str) -> None:
    """The conformance cases on the other Pythons."""
    session.install("-c", "constraints.txt", "-e", ".", *TEST, *FRAMEWORKS[backend][:1])
    run_tests(session, [backend], *COMMON)


@nox.session
@nox.parametrize("backend", list(OLDEST), ids=list(OLDEST))
def oldest(session: nox.Session, backend: str) -> None:
    """The conformance cases on the oldest versions that pyproject.toml allows."""
    session.install("-e", ".", *TEST, *OLDEST[backend])
    run_tests(session, [backend], *COMMON)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and pyright."""
    session.install("-c", "constraints.txt", "-e", ".", *LINT)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("pyright")


@nox.session
def package(session: nox.Session) -> None:
    """sdist, the wheel from it, and the quickstart with that wheel, away from the checkout."""
    session.install("-c", "constraints.txt", "build", "twine")
    dist = Path(session.create_tmp()).resolve()
    session.run("python", "-m", "build", "--outdir", str(dist))
    built = sorted(str(path) for path in dist.glob("cgshim-*"))
    session.run("twine", "check", "--strict", *built)
    session.install("-c", "constraints.txt", "--force-reinstall", *[path for path in built if path.endswith(".whl")])
    quickstart = str(Path("examples/log1pexp.py").resolve())
    session.chdir(dist)
    session.run("python", quickstart)
    session.run("python", "-m", "cgshim", "--require", "numpy")


@nox.session
def transformations(session: nox.Session) -> None:
    """Run every transformation on every backend, and write docs/transformations.md."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    session.install("-c", "constraints.txt", "-e", ".", *frameworks)
    results = session.create_tmp()
    report = "tests/transformations/report.py"
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"}
    for backend in FRAMEWORKS:
        session.run("python", report, "run", backend, results, env=devices)
    session.run("python", report, "write", results, "docs/transformations.md")


@nox.session
def ops(session: nox.Session) -> None:
    """Compare cgshim.ops with NumPy on every backend, and write docs/ops.md."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    session.install("-c", "constraints.txt", "-e", ".", *frameworks)
    session.run("python", "tests/ops/compare.py", "docs/ops.md")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure every backend against code by hand, and write docs/performance.md."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    session.install("-c", "constraints.txt", "-e", ".", *frameworks)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant small mistakes in the package, and count those that the tests notice."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    session.install("-c", "constraints.txt", "-e", ".", "cosmic-ray", "coverage", "pytest-cov", *TEST, *frameworks)
    session.run("python", "-m", "mutants", str(session.cache_dir / "mutants"), *session.posargs)


@nox.session
def mlx(session: nox.Session) -> None:
    """The stranger's backend in examples/cgshim-mlx: built, installed and run."""
    session.install("-c", "constraints.txt", ".", "build", "mlx[cpu]", *TEST)
    dist = Path(session.create_tmp())
    session.run("python", "-m", "build", "--outdir", str(dist), "examples/cgshim-mlx")
    session.install("-c", "constraints.txt", "--force-reinstall", "--no-deps", *map(str, dist.glob("*.whl")))
    session.run("pytest", "-q", "examples/cgshim-mlx")
    session.run("python", "-m", "cgshim", "--require", "mlx")


@nox.session
def pictures(session: nox.Session) -> None:
    """The pictures of docs/cookbook.md, drawn by the examples on NumPy."""
    session.install("-c", "constraints.txt", "-e", ".", "scikit-learn", "matplotlib")
    session.env["CGSHIM_BACKEND"] = "numpy"
    for name in ["straight_through", "gradient_reversal", "clipped_gradient", "scipy_adjoint", "wave_in_c"]:
        session.run("python", f"examples/{name}.py", "--picture", f"docs/img/{name}.png")
