"""Tests on a GPU run where one is; elsewhere the summary counts them. A plugin, which conftest.py
registers.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

NOT_RUN = pytest.StashKey[int]()
"""how many tests needed a GPU that is not here"""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "gpu: needs a GPU, or --gpu-device cpu, which tries it without"
    )
    config.addinivalue_line("markers", "only_on_gpu: a gpu test that cannot be tried without")
    config.stash[NOT_RUN] = 0


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    left_out = [item for item in items if not _can_run(item, config.option.gpu_device)]
    if left_out:
        config.stash[NOT_RUN] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _can_run(item: pytest.Item, device: str | None) -> bool:
    if item.get_closest_marker("gpu") is None or device == "cuda":  # where none is, it fails
        return True
    if device == "cpu":
        return item.get_closest_marker("only_on_gpu") is None
    return _has_gpu(item.path.stem.rpartition("_")[2])


def _has_gpu(backend: str) -> bool:
    framework: Any = sys.modules[backend]
    return (
        framework.cuda.is_available()
        if backend == "torch"
        else framework.default_backend() == "gpu"
    )


# --- Where xdist runs tests in processes of its own -----------------------------------------------


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["gpu_not_run"] = session.config.stash[NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take a worker's number: each worker has collected all tests."""
    node.config.stash[NOT_RUN] = getattr(node, "workeroutput", {}).get("gpu_not_run", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = config.stash[NOT_RUN]
    if count:
        why = (
            "cannot be tried without a GPU" if config.option.gpu_device == "cpu" else "no GPU here"
        )
        terminalreporter.write_line(
            f"not run: {count} gpu tests, {why} (`nox -s gpu` runs them where one is)"
        )
