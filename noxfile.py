"""`nox` runs what CI runs; `nox -l` lists the rest."""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
from nox.command import CommandFailed

# what is installed without bytecode writes it when it is first imported: without it TensorFlow
# takes 11 s for 5
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

nox.options.sessions = ["tests", "tests_all", "lint", "docs", "package"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

# What the tests of a backend import, beside cgshim: its framework, and the libraries of its own
# world.
FRAMEWORKS = {
    "numpy": ["scikit-learn"],
    "jax": ["jax", "equinox", "flax", "flatbuffers", "keras", "scikit-learn"],
    "torch": ["torch", "keras", "scikit-learn"],
    "tensorflow": ["tensorflow-cpu", "keras", "scikit-learn"],
}
PROJECT = nox.project.load_toml("pyproject.toml")
TEST, LINT, DOCS = (
    nox.project.dependency_groups(PROJECT, group) for group in ("test", "lint", "docs")
)

SETTINGS = {
    # two processes test on two cores: threads of theirs would only wait for each other, busily
    "OMP_NUM_THREADS": "1",
    # JAX's tests compile 14,000 small programs, each of which runs once. XLA:CPU's fusion emitters
    # (jaxlib 0.10, through MLIR) take twice as long to compile as what they replace; half of the
    # programs are an earlier test's
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

GPU = {"jax": ["jax[cuda13]"], "torch": ["torch"]}
NIGHTLY = {"numpy": "numpy", "jax": "jax", "torch": "torch", "tensorflow": "tf-nightly-cpu"}

# The libraries of examples/adopted, with what they need beside themselves.
ADOPTED = {
    "pennylane==0.45.1": [
        *("jax==0.7.1", "torch", "tensorflow-cpu"),
        *("pytest-mock", "pytest-rng", "flaky"),
    ],
    "pot==0.9.7.post1": ["torch", "jax", "tensorflow-cpu"],
    "tensorcircuit-ng==1.10.0": ["torch", "jax", "tensorflow-cpu"],
    "cvxpylayers==1.2.0": ["torch", "jax", "numpy<2.4"],
    "geomstats==2.8.0": ["torch", "numpy<2.4"],
}

# What depends on no framework runs with NumPy; some of it with all, too.
ALIKE = [
    *(
        f"tests/front/test_{name}.py"
        for name in (
            "conformance_command",
            "environment",
            "main",
            "plug_ins",
            "run",
            "structure",
            "writing_a_backend",
        )
    ),
    *("tests/docs/test_documents.py", "tests/docs/test_site.py", "tests/ops/test_definitions.py"),
    *("tests/release", "tests/versions"),
]


def install(session: nox.Session, *args: str) -> None:
    """Install the pinned versions, and compile only what is imported: it takes less than all
    modules.

    By uv, which takes 3 s where pip takes 15; by pip where uv is not installed or does not find
    all. torch always by pip, whose configuration says which of torch's builds.
    """
    pinned = ["-c", "constraints.txt"]
    if "torch" in args:
        session.install("--no-compile", *pinned, "torch")
    uv = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", f"{session.bin}/python"]
    try:
        session.run_install(*uv, *pinned, *args, external=True)
    except CommandFailed:
        session.install("--no-compile", *pinned, *args)


def run_tests(session: nox.Session, backends: list[str], *paths: str) -> None:
    """The tests (by default all) of these backends; one that does not import fails the session."""
    chosen = [word for backend in backends for word in ("--backend", backend)]
    settings = {**SETTINGS, "JAX_COMPILATION_CACHE_DIR": str(session.cache_dir / "jax")}
    # in the order of files: what one test has compiled, the next finds in the same process
    parallel = ["-n", "2", "--dist", "worksteal"]
    # what the other process is still writing is compiled once more (JAX 0.10 does not lock its cache)
    half_written = ["-W", "ignore:Error reading persistent compilation cache"]
    options = [*parallel, *half_written, *chosen]
    session.run("pytest", "-q", *options, *paths, *session.posargs, env=settings)


@nox.session
@nox.parametrize("backend", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def tests(session: nox.Session, backend: str) -> None:
    """All tests of one backend, where no other framework is installed."""
    install(session, "-e", ".", *TEST, *FRAMEWORKS[backend])
    alike = ALIKE if backend != "numpy" else []
    run_tests(session, [backend], "tests", *(f"--ignore={path}" for path in alike))


def import_from_tests(session: nox.Session) -> bool:
    """Let this environment import what is installed for the tests of each backend, if all are there.

    Installed and compiled to bytecode once more, the frameworks take half a minute.
    """
    own = Path(session.bin).parent
    packages = next(own.glob("lib/python*/site-packages"), own)  # elsewhere on Windows
    others = [own.with_name(f"tests-{name}") / packages.relative_to(own) for name in FRAMEWORKS]
    are_there = packages != own and all(map(Path.exists, others))
    if are_there:
        (packages / "tests_of_each.pth").write_text("\n".join(map(str, others)))
    return are_there


@nox.session
def tests_all(session: nox.Session) -> None:
    """All backends in one process: dispatch by type, mixed frameworks."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    install(session, "-e", ".", *TEST, *([] if import_from_tests(session) else frameworks))
    # what asks whose a tensor is; each backend has run all else by itself
    asking = [f"tests/front/test_{name}.py" for name in ("choosing", "dtypes", "imports", "main")]
    asking += ["tests/conformance/test_conformance.py", "tests/test_messages.py", "tests/together"]
    of_others = "not conformance or foreign or constant or tensor_in_an_object"
    run_tests(session, list(FRAMEWORKS), *asking, "-k", of_others)


@nox.session
def versions(session: nox.Session) -> None:
    """The conformance cases on every version of every framework, written to docs/versions.md
    (hours; restartable).
    """
    session.run(
        "python", "tests/versions/run.py", str(session.cache_dir / "versions"), *session.posargs
    )


@nox.session
@nox.parametrize("backend", list(NIGHTLY), ids=list(NIGHTLY))
def nightly(session: nox.Session, backend: str) -> None:
    """The conformance cases on what is released next, as far as a registry has it; only reports."""
    found = session.run(
        "pip", "install", "--pre", "--upgrade", NIGHTLY[backend], success_codes=[0, 1], silent=True
    )
    session.install("-e", ".", *TEST)
    session.log(f"{NIGHTLY[backend]}: {(found or '').strip().splitlines()[-1:]}")
    session.run(
        "pytest",
        "-q",
        "--backend",
        backend,
        "tests/conformance",
        *session.posargs,
        success_codes=range(6),
    )


@nox.session
@nox.parametrize("backend", list(GPU), ids=list(GPU))
def gpu(session: nox.Session, backend: str) -> None:
    """The tests that need a GPU; other sessions count them as not run."""
    install(session, "-e", ".", *TEST, *GPU[backend])
    session.run(
        "pytest", "-q", "--backend", backend, "--gpu-device", "cuda", "tests/gpu", *session.posargs
    )


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy and pyright."""
    install(session, "-e", ".", *LINT)
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    with ThreadPoolExecutor() as both:  # each takes one core
        list(both.map(session.run, ["mypy", "pyright"]))


@nox.session
def docs(session: nox.Session) -> None:
    """README, docs/ and the docstrings as a site in site/; a broken link, anchor or reference
    fails.
    """
    install(session, "-e", ".", *DOCS)
    shutil.rmtree("site", ignore_errors=True)
    session.run(
        "sphinx-build",
        "-q",
        "--fail-on-warning",
        "-c",
        "docs",
        "-d",
        session.create_tmp(),
        ".",
        "site",
    )
    session.run("python", "tests/docs/overflow.py", "site")


@nox.session
@nox.parametrize("backend", list(FRAMEWORKS), ids=list(FRAMEWORKS))
def readers(session: nox.Session, backend: str) -> None:
    """The wheel in an empty environment with one framework alone, where the tutorial's code runs."""
    dist = Path(session.create_tmp())
    session.run("pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(dist), ".")
    framework = FRAMEWORKS[backend][:1] if backend != "numpy" else []
    install(session, "--force-reinstall", *map(str, dist.glob("*.whl")), *framework)
    session.run("python", "tests/docs/blocks.py", "docs/learn.md", backend)


@nox.session
def package(session: nox.Session) -> None:
    """dist/: sdist, the wheel from it, and that wheel tested by the sdist's tests, away from the
    checkout.
    """
    install(session, "build", "twine", "check-wheel-contents", *TEST, *FRAMEWORKS["numpy"])
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    [wheel], [sdist] = Path("dist").resolve().glob("*.whl"), Path("dist").resolve().glob("*.tar.gz")
    session.run("twine", "check", "--strict", str(wheel), str(sdist))
    session.run("check-wheel-contents", str(wheel))
    install(session, "--force-reinstall", str(wheel))
    unpacked = Path(session.create_tmp(), sdist.name.removesuffix(".tar.gz"))
    shutil.rmtree(unpacked, ignore_errors=True)
    shutil.unpack_archive(sdist, unpacked.parent, filter="data")
    shutil.rmtree(unpacked / "cgshim")  # so that all imports are of the wheel
    session.chdir(unpacked)
    session.run("python", "examples/log1pexp.py")
    session.run("python", "-m", "cgshim", "--require", "numpy")
    # what asks what is installed; the checkout's tests have run the rest on the same files
    asking = [
        f"tests/front/test_{name}.py" for name in ("choosing", "environment", "imports", "main")
    ]
    run_tests(session, ["numpy"], *asking, "tests/test_messages.py")
    session.run("python", "-m", "cgshim", "conformance", "numpy", "-k", "residual", silent=True)


@nox.session
def release(session: nox.Session) -> None:
    """The notes of the version in pyproject.toml, which git has not tagged yet, and its package;
    uploads nothing.
    """
    session.run("python", "tests/release/release_notes.py", PROJECT["project"]["version"])
    session.notify("package")


@nox.session
def transformations(session: nox.Session) -> None:
    """Run every transformation on every backend, and write docs/transformations.md."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    install(session, "-e", ".", *frameworks)
    results = session.create_tmp()
    report = "tests/transformations/report.py"
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_ENABLE_X64": "1"}
    for backend in FRAMEWORKS:
        session.run("python", report, "run", backend, results, env=devices)
    session.run("python", report, "write", results, "docs/transformations.md")


@nox.session
def ops(session: nox.Session) -> None:
    """Compare cgshim.ops with NumPy on every backend; write docs/ops.md and its stub."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    install(session, "-e", ".", *frameworks)
    session.run("python", "tests/ops/compare.py", "docs/ops.md")
    session.run("python", "tests/ops/stub.py", "docs/ops.md", "cgshim/ops/__init__.pyi")


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure every backend against code by hand, and write docs/performance.md."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    install(session, "-e", ".", *frameworks)
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Plant small mistakes in the package, and count those that the tests notice."""
    frameworks = [name for needed in FRAMEWORKS.values() for name in needed]
    install(session, "-e", ".", "cosmic-ray", "coverage", "pytest-cov", *TEST, *frameworks)
    session.run("python", "tests/mutants", str(session.cache_dir / "mutants"), *session.posargs)


def run_third_party(session: nox.Session, name: str, framework: str) -> None:
    """A third-party backend: built, installed and run."""
    install(session, ".", "build", framework, *TEST)
    dist = Path(session.create_tmp())
    session.run("python", "-m", "build", "--outdir", str(dist), f"examples/cgshim-{name}")
    install(session, "--force-reinstall", "--no-deps", *map(str, dist.glob("*.whl")))
    session.run("pytest", "-q", f"examples/cgshim-{name}")
    session.run("python", "-m", "cgshim", "--require", name)


@nox.session
def mlx(session: nox.Session) -> None:
    """The third-party backend in examples/cgshim-mlx."""
    run_third_party(session, "mlx", "mlx[cpu]")


@nox.session
def tinygrad(session: nox.Session) -> None:
    """The third-party backend in examples/cgshim-tinygrad, on tinygrad's emulator in Python."""
    run_third_party(session, "tinygrad", "tinygrad")


@nox.session
@nox.parametrize(
    "library", list(ADOPTED), ids=[name.partition("==")[0].removesuffix("-ng") for name in ADOPTED]
)
def adopted(session: nox.Session, library: str) -> None:
    """A library from the registry, with its adapter in examples/adopted in the place of its own
    gradients: its own tests where its package has them, else comparisons.
    """
    name = library.partition("==")[0].removesuffix("-ng")
    folder = Path(session.create_tmp())
    if "torch" in ADOPTED[library]:  # as it is tested, and not the newest with its CUDA packages
        install(session, "torch")
    session.install("-e", ".", "pytest", "pytest-xdist", library, *ADOPTED[library])
    if name == "pot":  # whose tests are in its sdist alone
        session.run(
            "pip", "download", "-q", "--no-deps", f"--no-binary={name}", "-d", str(folder), library
        )
        (sdist,) = folder.glob("*.tar.gz")
        shutil.unpack_archive(sdist, folder, filter="data")
    session.run("python", f"examples/adopted/{name}/run.py", str(folder), *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """The pictures of docs/cookbook.md, drawn by the examples on NumPy."""
    install(session, "-e", ".", "scikit-learn", "matplotlib")
    session.env["CGSHIM_BACKEND"] = "numpy"
    for name in [
        "straight_through",
        "gradient_reversal",
        "clipped_gradient",
        "scipy_adjoint",
        "wave_in_c",
    ]:
        session.run("python", f"examples/{name}.py", "--picture", f"docs/img/{name}.png")
