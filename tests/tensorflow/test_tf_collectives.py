"""all_reduce in rules, in two replicas: in grad_fn it adds up the gradients, and in f it is
refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "collectives.py"
REFUSED = "summed: f must be given every tensor that is differentiated, got a captured f32[2,3]; pass it as an argument"


def test_in_two_replicas() -> None:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    run = subprocess.run(
        [sys.executable, str(PROGRAM)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [REFUSED, REFUSED, "2 replicas"]
