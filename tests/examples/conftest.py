"""Examples import each other, as scripts do, and run on the backend of the test."""

import sys
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import cgshim

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def on_backend(backend, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["example"])
    warnings_of_numpy = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    # test processes share the cores
    with cgshim.use_backend(backend), threadpool_limits(1), warnings_of_numpy:
        yield
