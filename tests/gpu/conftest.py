"""What the tests on a GPU share. The ones that the CPU can run too are tried there by `--gpu-device
cpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file's name ends in the backend that it tests; it is a part of the runs that test this
    backend.
    """
    backend = collection_path.stem.rpartition("_")[2]
    is_of_a_backend = collection_path.name.startswith("test_gpu_")
    return True if is_of_a_backend and backend not in config.option.backends else None


@pytest.fixture
def device(pytestconfig: pytest.Config) -> str:
    """Where tensors are: cuda, unless the run says otherwise."""
    return pytestconfig.option.gpu_device or "cuda"
