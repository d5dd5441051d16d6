"""A pytest plug-in: run tests that take `backend` on every installed or requested backend.

One line in the conftest.py of your tests, where pytest is started, turns it on::

    pytest_plugins = ["cgshim.testing.pytest_plugin"]

A test may set ``backend`` itself, by ``parametrize`` or a fixture of that name.
``pytest --backend jax --backend torch``, or ``CGSHIM_BACKEND=jax pytest``, requests backends by
name. A requested backend that cannot be imported fails the run; no test is skipped silently.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import cgshim
from cgshim._registry import entry_points, load

_MARK = "cgshim_backend"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend", action="append", metavar="NAME", dest="backends",
        help="test this backend (may be repeated); by default CGSHIM_BACKEND, or every one that can be imported",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Set `config.option.backends` to the backends of the run; one that does not import fails the
    run.
    """
    config.addinivalue_line("markers", f"{_MARK}(name): the backend that is chosen for a test")
    chosen = cgshim.config_backend()
    by_default = [chosen] if chosen else cgshim.available_backends()
    config.option.backends = list(dict.fromkeys(config.option.backends or by_default))
    for name in config.option.backends:
        try:
            load(name)
        except cgshim.BackendError as error:
            raise pytest.UsageError(f"--backend {name}: {error}") from error


def pytest_report_header(config: pytest.Config) -> str:
    tested = config.option.backends
    left_out = [name for name in entry_points() if name not in tested]
    return f"backends: {', '.join(tested)}" + (
        f" (not in this run: {', '.join(left_out)})" if left_out else ""
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes a backend once per backend, unless the test parametrizes it."""
    if "backend" in metafunc.fixturenames and not _has_its_own(metafunc):
        mark = getattr(pytest.mark, _MARK)
        backends = metafunc.config.option.backends
        metafunc.parametrize("backend", [pytest.param(name, marks=mark(name)) for name in backends])


def _has_its_own(metafunc: pytest.Metafunc) -> bool:
    marks = metafunc.definition.iter_markers("parametrize")
    names = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in marks]
    names = [name.split(",") if isinstance(name, str) else name for name in names]
    fixtures = metafunc._arg2fixturedefs  # pytest has no public name for them
    return "backend" in fixtures or any("backend" in map(str.strip, each) for each in names)


# Hypothesis forbids function-scoped fixtures that a test names, because it reruns the test
@pytest.fixture(autouse=True)
def backend_in_use(request: pytest.FixtureRequest) -> Iterator[None]:
    """Choose the backend that a test takes by `cgshim.use_backend`, while the test runs."""
    mark = request.node.get_closest_marker(_MARK)
    if mark is None:
        yield
        return
    with cgshim.use_backend(*mark.args):
        yield
