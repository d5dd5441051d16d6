"""A library's own tests, with its own gradients and with an adapter in their place.

    python examples/adopted/suite.py NAME FOLDER [pytest's arguments]

runs the tests in a folder twice: as they are, and after `adopt()` of NAME/adapter.py. It prints how
many pass and fail for theirs and for ours, and names each failure of ours that is not theirs too.
`--again`, as the first of pytest's arguments, runs without the adapter only what fails with it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent


def pytest_configure() -> None:
    """Adopt, before pytest imports a test: this module is its plug-in too."""
    place = HERE / os.environ["ADOPTED"] / "adapter.py"
    spec = importlib.util.spec_from_file_location("adapter", place)
    assert spec is not None
    assert spec.loader is not None
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    adapter.adopt()


def outcomes(name: str | None, where: Path, tests: list[str]) -> dict[str, str]:
    """Run tests with the adapter of this name, or without one; return the outcome of each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            "-o",
            "addopts=",
        ]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "ADOPTED": name or ""}
        command += ["-p", "suite"] if name else []
        subprocess.run([*command, *tests], cwd=where, env=environment, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return {
            f"{case.get('file')}::{case.get('classname', '').split('.')[-1]}::{case.get('name')}": (
                case[0].tag if len(case) else "passed"
            )
            for case in cases
        }


def failed(found: dict[str, str]) -> set[str]:
    return {test for test, outcome in found.items() if outcome in ("failure", "error")}


def line(whose: str, found: dict[str, str]) -> str:
    passed = sum(outcome == "passed" for outcome in found.values())
    return f"{whose}: {passed} passed, {len(failed(found))} failed"


def main(name: str, where: Path, tests: list[str]) -> int:
    """Run both, print both, and return 1 if only ours has a failure."""
    again = "--again" in tests
    tests = [test for test in tests if test != "--again"]
    ours = outcomes(name, where, tests)
    print(line(f"{name}, ours", ours), flush=True)
    mine = failed(ours)
    if again and mine:  # by their names alone: a class of theirs may stand between
        tests = sorted({test.split("::")[0] for test in mine})
    theirs = {} if again and not mine else outcomes(None, where, tests)
    print(line(f"{name}, theirs", theirs))
    own = sorted(mine - failed(theirs))
    print(f"failures of both: {len(mine & failed(theirs))}, of ours alone: {len(own)}")
    for test in own:
        print(f"  {test}")
    return bool(own)


if __name__ == "__main__":
    name, folder, *arguments = sys.argv[1:]
    sys.exit(main(name, Path(folder), arguments))
