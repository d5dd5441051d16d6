"""Runs a library's own tests, as they are and with cgshim in the place of its own gradients."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path


def outcomes(arguments: Sequence[str], cwd: Path, adapter: Path | None) -> dict[str, str]:
    """Return how each test ended, by pytest with these arguments; with an adapter installed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        environment = dict(os.environ)
        plugin = []
        if adapter is not None:
            Path(folder, "with_adapter.py").write_text("import adapter\nadapter.install()\n")
            paths = [folder, str(adapter.parent), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            plugin = ["-p", "with_adapter"]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *plugin,
             "-o", "addopts=", f"--junit-xml={report}", *arguments],
            cwd=cwd, env=environment, check=False, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return {
            f"{case.get('classname')}::{case.get('name')}": next(
                (part.tag for part in case if part.tag in ("failure", "error", "skipped")), "passed"
            )
            for case in ElementTree.parse(report).iter("testcase")
        }


def compare_tests(arguments: Sequence[str], cwd: Path, adapter: Path) -> int:
    """Print how their tests end with theirs and with ours; return how many end worse with ours."""
    theirs, ours = outcomes(arguments, cwd, None), outcomes(arguments, cwd, adapter)
    for title, ended in (("theirs", theirs), ("ours", ours)):
        values = [*ended.values()]
        skipped, passed = values.count("skipped"), values.count("passed")
        failed = len(values) - skipped - passed
        print(f"{title}: {passed} passed, {failed} failed, {skipped} skipped", flush=True)
    worse = [at for at, end in theirs.items() if end == "passed" != ours.get(at)]
    better = [at for at, end in theirs.items() if end != "passed" == ours.get(at)]
    for title, names in (("fails with ours alone", worse), ("passes with ours alone", better)):
        for name in names:
            print(f"  {title}: {name}")
    return len(worse)
