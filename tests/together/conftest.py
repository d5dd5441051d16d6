"""Programs of several frameworks: a part of the runs that test all of these."""

from pathlib import Path

import pytest

FRAMEWORKS = {"jax", "torch"}
ROOT = Path(__file__).parents[2]


def pytest_ignore_collect(config):
    return True if FRAMEWORKS - set(config.option.backends) else None


@pytest.fixture(autouse=True)
def examples_and_one_thread(monkeypatch):
    import torch

    for folder in ("examples", "tests/examples"):
        monkeypatch.syspath_prepend(ROOT / folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # test processes share the cores
    yield
    torch.set_num_threads(threads)
