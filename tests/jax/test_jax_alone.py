"""Every file of this folder can be run by itself: float64 is there however pytest was called."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TEST = "test_op_vjp_hands_out_the_numbers_of_jax or test_an_integer_is_no_variable or test_weak_types_stay_weak"


def test_a_file_is_run_by_itself():
    path = HERE / "test_jax_leaves.py"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", TEST, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent.parent)
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout
