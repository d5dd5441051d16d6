"""What a run tests beside cgshim's own plug-in: gaps are strict, and a backend's folder belongs to
its runs.
"""

from __future__ import annotations

import collections
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import gpus
import pairwise
import pytest
from gaps import gaps_of

from cgshim._registry import entry_points

TESTS = Path(__file__).parent
PROGRAM = "/jax/core/compile/backend_compile_duration"
compiled = collections.Counter[str]()
pytest_plugins = ["cgshim.testing.pytest_plugin"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-device", choices=["cuda", "cpu"],
        help="run the gpu tests on cuda, or try them on the cpu; by default they run where a GPU is",
    )  # fmt: skip
    parser.addoption(
        "--pairwise", action="store_true", help="run each pair of the values of parameters, not all"
    )


@pytest.hookimpl(tryfirst=True)  # before the plug-in imports the frameworks
def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    # with JAX_COMPILATION_CACHE_DIR every program is kept: half of them are an earlier test's
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # inductor's other processes, and its trials of vector instructions, import torch for seconds
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
    config.pluginmanager.register(gpus)
    config.pluginmanager.register(pairwise)


def pytest_collection_finish() -> None:
    """Let `gc.collect()` skip what is there before the first test: 5 ms instead of 250."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A backend's own folder is a part of the runs that test the backend."""
    name = collection_path.name
    of_a_backend = collection_path.parent == TESTS / "backends" and name in entry_points()
    return True if of_a_backend and name not in config.option.backends else None


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if "numpy" not in config.option.backends:
        config.hook.pytest_deselected(items=[item for item in items if not _has_backend(item)])
        items[:] = filter(_has_backend, items)
    gaps = {backend: gaps_of(backend) for backend in config.option.backends}
    for item in items:
        backend, name = _row_of(item)
        of_backend = gaps.get(backend, {})
        reason = of_backend.get(name, of_backend.get(name.split("[")[0]))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def _has_backend(item: pytest.Item) -> bool:
    """Return False for a test without a backend: it runs once, in the runs that test NumPy."""
    if any(TESTS / name in item.path.parents for name in ("backends", "gpu", "together")):
        return True
    return not {"backend", "backends", "case", "cell", "pair", "twin"}.isdisjoint(item.fixturenames)


def _row_of(item: pytest.Item) -> tuple[str, str]:
    """Where a test would stand in the table of gaps: under its case's backend, its parameter's, or
    its folder's.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = parameters.get("case")
    if case is not None and hasattr(case, "framework"):
        return case.framework.name, case.name
    return parameters.get("backend", item.path.parent.name), item.name


@pytest.fixture(autouse=True)
def no_trace_of_the_test_before() -> Iterator[None]:
    """An error within a derivative leaves autograd's count of traces raised, for good (1.9: it has
    no `finally`).

    No call would be plain in the tests after it.
    """
    yield
    if (tracer := sys.modules.get("autograd.tracer")) is not None:
        tracer.trace_stack.top = -1


@pytest.fixture(autouse=True)
def few_programs() -> Iterator[None]:
    """JAX keeps each program that it has compiled, a megabyte each: two for a test of JAX.

    In a process of 3 GB it lowers another in 12 ms, in a new one in 6 (JAX 0.10).
    """
    yield
    if compiled[PROGRAM] > 1000:
        compiled.clear()
        sys.modules["jax"].clear_caches()


@pytest.fixture(autouse=True, scope="session")
def programs_are_counted(pytestconfig: pytest.Config) -> None:
    if "jax" in pytestconfig.option.backends:
        importlib.import_module("jax").monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: compiled.update([event])
        )


@pytest.fixture(autouse=True)
def backend_in_use() -> None:
    """Nothing, where the plug-in's chooses the backend: most tests try the choice by types too."""


@pytest.fixture(scope="session")
def backends(pytestconfig: pytest.Config) -> list[str]:
    """The backends of this run."""
    return list(pytestconfig.option.backends)
