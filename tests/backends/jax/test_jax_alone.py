"""Every file of this folder can be run by itself: float64 is there however pytest was called."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TEST = "test_weak_types_stay_weak"
# to collect the whole folder takes half a minute
OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "--ignore-glob=*/test_jax_[!l]*", "-k", TEST]


@pytest.mark.parametrize("path", [HERE, HERE / "test_jax_leaves.py"], ids=["folder", "file"])
def test_what_pytest_was_given_does_not_matter(path):
    command = [sys.executable, "-m", "pytest", *OPTIONS, str(path)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=HERE.parent.parent
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
