"""The published functions are the files of examples/published; here they run on the backend of the
test.
"""

import sys
from pathlib import Path

import pytest

from cgshim import use_backend

sys.path.append(str(Path(__file__).parents[2] / "examples" / "published"))


@pytest.fixture(autouse=True)
def on_backend(backend):
    with use_backend(backend):
        yield
