"""What has to be decided before TensorFlow or Keras starts runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"


PRINTED = {
    "mirrored.py": "2 replicas",
    "keras_fit.py": "fitted",
    "weak.py": "105.0",
}


@pytest.mark.parametrize(("program", "last_line"), PRINTED.items())
def test_program(program: str, last_line: str) -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, str(PROGRAMS / program)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == last_line
