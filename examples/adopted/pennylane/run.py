"""Runs PennyLane's own tests of its interfaces, with them and with the adapter in their place.

`python examples/adopted/pennylane/run.py FOLDER [TESTS]`: the wheel holds the tests, the whole of
which takes hours; TESTS are files or folders of them. FOLDER is not needed. Then it measures what
was replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pennylane

sys.path.insert(0, str(Path(__file__).parents[1]))
import times
from own_tests import compare_tests

if __name__ == "__main__":
    tests = sys.argv[2:] or ["workflow/interfaces"]
    own = Path(pennylane.__file__).parents[1] / "tests"
    failed = compare_tests(tests, own, Path(__file__).with_name("adapter.py"))
    times.main()
    sys.exit(failed)
