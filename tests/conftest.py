"""Which backends a run tests: those that were asked for, and failing that every one whose framework is here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gpus
import pytest
from gaps import gaps_of

import cgshim
from cgshim._registry import entry_points
from cgshim.testing import conformance

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", action="append", metavar="NAME", dest="backends",
        help="test this backend (may be repeated); by default every one whose framework can be imported",
    )  # fmt: skip
    parser.addoption(
        "--gpu-device", choices=["cuda", "cpu"],
        help="run the gpu tests on cuda, or try them on the cpu; by default they run where a GPU is",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """From here on `config.option.backends` are the backends of the run; one that does not import fails the run."""
    _take_off_path()
    config.pluginmanager.register(gpus)
    config.option.backends = list(dict.fromkeys(config.option.backends or cgshim.available_backends()))
    for name in config.option.backends:
        try:
            conformance.Framework(name)
        except cgshim.BackendError as error:
            raise pytest.UsageError(f"--backend {name}: {error}") from error


def pytest_collection_finish() -> None:
    _take_off_path()


def _take_off_path() -> None:
    """pytest puts this folder on sys.path, where jax/ and torch/ would pass for the frameworks of that name."""
    sys.path[:] = [entry for entry in sys.path if entry != str(HERE)]


def pytest_report_header(config: pytest.Config) -> str:
    tested = config.option.backends
    left_out = [name for name in entry_points() if name not in tested]
    return f"backends: {', '.join(tested)}" + (f" (not in this run: {', '.join(left_out)})" if left_out else "")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A backend's own folder is a part of the runs that test the backend."""
    name = collection_path.name
    of_a_backend = collection_path.parent == HERE and name in entry_points()
    return True if of_a_backend and name not in config.option.backends else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a backend runs once for each backend of the run."""
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", metafunc.config.option.backends)


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    gaps = {backend: gaps_of(backend) for backend in config.option.backends}
    for item in items:
        backend, name = _row_of(item)
        of_backend = gaps.get(backend, {})
        reason = of_backend.get(name, of_backend.get(name.split("[")[0]))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _row_of(item: pytest.Item) -> tuple[str, str]:
    """Where a test would stand in the table of gaps: under its case's backend, its parameter's, or its folder's."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case")
    if case is not None and hasattr(case, "framework"):
        return case.framework.name, case.name
    return parameters.get("backend", item.path.parent.name), item.name


@pytest.fixture(autouse=True)
def no_trace_of_the_test_before() -> Iterator[None]:
    """An error within a derivative leaves autograd's count of traces raised, for good (1.9: it has no `finally`).

    No call would be plain in the tests after it.
    """
    yield
    if (tracer := sys.modules.get("autograd.tracer")) is not None:
        tracer.trace_stack.top = -1


@pytest.fixture(scope="session")
def backends(pytestconfig: pytest.Config) -> list[str]:
    """The backends of this run."""
    return list(pytestconfig.option.backends)
