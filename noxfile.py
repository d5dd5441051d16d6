"""`nox` runs what CI runs; `nox -l` lists the other sessions."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import nox

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # TensorFlow's import would take 11 s instead of 5
nox.options.sessions = ["tests", "tests_all", "lint", "docs", "package"]
nox.options.reuse_venv = "yes"

FRAMEWORKS = {
    "numpy": ["scikit-learn"],
    "jax": ["jax", "equinox", "flax", "flatbuffers", "keras", "scikit-learn"],
    "torch": ["torch", "keras", "scikit-learn"],
    "tensorflow": ["tensorflow-cpu", "keras", "scikit-learn"],
}
ALL = [name for needed in FRAMEWORKS.values() for name in needed]
ADOPTED = ["pennylane", "pot", "tensorcircuit", "cvxpylayers", "geomstats"]
GROUPS = nox.project.load_toml("pyproject.toml")["dependency-groups"]
OF_SEVERAL = [f"tests/front/test_{name}.py" for name in ("choosing", "dtypes", "imports")]
OF_SEVERAL += ["tests/conformance/test_conformance.py", "tests/test_messages.py", "tests/together"]
OF_SEVERAL += ["-k", "not conformance or foreign or constant or tensor_in_an_object"]
SETTINGS = {
    "OMP_NUM_THREADS": "1",  # test processes share the cores
    # XLA's fusion emitters (jaxlib 0.10) take twice as long to compile
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0",
}


def install(session: nox.Session, *args: str) -> None:
    """Install pinned versions by uv, or by pip where uv fails. pip finds torch without CUDA."""
    pinned = ["-c", "constraints.txt"]
    if "torch" in args:
        session.install("--no-compile", *pinned, "torch")
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", f"{session.bin}/python"]
    try:
        session.run_install(*uv, *pinned, *args, external=True)
    except nox.command.CommandFailed:
        session.install("--no-compile", *pinned, *args)


def run_tests(session: nox.Session, backends: list[str], *options: str) -> None:
    """Run pytest on these backends. A backend that does not import fails the session."""
    chosen = [word for backend in backends for word in ("--backend", backend)]
    settings = {**SETTINGS, "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir / "jax")}
    parallel = ["--pairwise", "-n", "2", "--dist", "worksteal"]
    session.run("pytest", "-q", *parallel, *chosen, *options, *session.posargs, env=settings)


@nox.session
@nox.parametrize("backend", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def tests(session: nox.Session, backend: str) -> None:
    """Test one backend, where no other framework is installed."""
    install(session, "-e", ".", *GROUPS["test"], *FRAMEWORKS[backend])
    run_tests(session, [backend], "tests")


@nox.session
def tests_all(session: nox.Session) -> None:
    """Test all backends in one process: dispatch by type, mixed frameworks."""
    own = next(Path(session.bin).parent.glob("[Ll]ib/**/site-packages"))
    others = [str(own).replace("tests_all", f"tests-{name}") for name in FRAMEWORKS]
    (own / "frameworks.pth").write_text("\n".join(others))  # to install them again takes 30 s
    missing = [] if all(map(os.path.exists, others)) else ALL
    install(session, "-e", ".", *GROUPS["test"], *missing)
    run_tests(session, list(FRAMEWORKS), *OF_SEVERAL)


@nox.session
@nox.parametrize("backend", ["jax", "torch"], ids=["jax", "torch"])
def gpu(session: nox.Session, backend: str) -> None:
    """Run the tests that need a GPU. Other sessions count them as not run."""
    install(session, "-e", ".", *GROUPS["test"], "jax[cuda13]" if backend == "jax" else "torch")
    session.run("pytest", "-q", "--backend", backend, "--gpu-device", "cuda", "tests/gpu")


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, mypy and pyright."""
    install(session, "-e", ".", *GROUPS["lint"])
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("pyright")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site in site/. A broken link, anchor or reference fails."""
    install(session, "-e", ".", *GROUPS["docs"])
    shutil.rmtree("site", ignore_errors=True)
    options = ["--fail-on-warning", "-c", "docs", "-d", session.create_tmp()]
    session.run("sphinx-build", "-q", *options, ".", "site")
    session.run("python", "tools/overflow.py", "site")


@nox.session
def package(session: nox.Session) -> None:
    """Build dist/, and test the wheel by tests of the sdist."""
    install(session, "build", "twine", "check-wheel-contents", *GROUPS["test"])
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    [wheel], [sdist] = Path("dist").glob("*.whl"), Path("dist").glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.run("check-wheel-contents", str(wheel))
    install(session, "--force-reinstall", str(wheel))
    shutil.unpack_archive(sdist, session.create_tmp(), filter="data")
    session.chdir(Path(session.create_tmp(), sdist.name.removesuffix(".tar.gz")))
    shutil.rmtree("cgshim")  # so that all imports are of the wheel
    session.run("python", "examples/log1pexp.py")
    run_tests(session, ["numpy"], "tests/front/test_environment.py", "tests/front/test_main.py")


@nox.session
def pages(session: nox.Session) -> None:
    """Write docs/ops.md and docs/transformations.md from runs on every backend."""
    install(session, "-e", ".", *ALL)
    for page in ("ops", "transformations"):
        session.run("python", f"tools/write_{page}.py")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure every backend beside code by hand, and write docs/performance.md."""
    install(session, "-e", ".", *ALL)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
@nox.parametrize("name", ["mlx", "tinygrad"], ids=["mlx", "tinygrad"])
def third_party(session: nox.Session, name: str) -> None:
    """Test a third-party backend of examples/."""
    install(session, "-e", ".", *GROUPS["test"], "mlx[cpu]" if name == "mlx" else name)
    session.install("--no-deps", f"examples/cgshim-{name}")
    session.run("pytest", "-q", f"examples/cgshim-{name}")


@nox.session
@nox.parametrize("library", ADOPTED, ids=ADOPTED)
def adopted(session: nox.Session, library: str) -> None:
    """Compare a library with itself, with its gradients replaced by examples/adopted/."""
    install(session, "torch")  # the libraries need older versions of the other frameworks
    session.install("-e", ".", "-r", f"examples/adopted/{library}/requirements.txt")
    run = f"examples/adopted/{library}/run.py"
    session.run("python", run, session.create_tmp(), *session.posargs)
