"""What has to be decided before TensorFlow or Keras starts runs in a process of its own.

TensorFlow is imported once: before it has run anything, its process may be forked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
PRINTED = {
    "mirrored.py": ["2 replicas"],
    "collectives.py": ["2 replicas"],
    "host_on_devices.py": ["2 devices"],
    "keras_fit.py": ["fitted"],
    "weak.py": ["105.0"],
}
RUN_EACH = """
import os, pathlib, runpy, sys, traceback
import tensorflow
for program in sys.argv[1:]:
    print("#", pathlib.Path(program).name, flush=True)
    if os.fork() == 0:
        status = 1
        try:
            runpy.run_path(program)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print("ended with", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_programs() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", RUN_EACH, *[str(PROGRAMS / name) for name in PRINTED]]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    expected = {name: [*lines, "ended with 0"] for name, lines in PRINTED.items()}
    of_each = [text.splitlines() for text in result.stdout.split("# ")[1:]]
    assert {name: lines for name, *lines in of_each} == expected, result.stderr
