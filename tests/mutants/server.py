"""A process that has a framework imported, and forks for each run of tests: so a run does not wait
for the import.

It reads a line of JSON for each run, and answers with one. Only the framework is imported here, and
nothing of it has run: cgshim itself, mutated or not, is imported by the child.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest

IMPORTED = {
    "numpy": ["numpy", "autograd.numpy", "optree", "autoray", "ml_dtypes"],
    "jax": ["numpy", "jax.numpy", "optree", "autoray", "jax.experimental.sparse"],
    "torch": ["numpy", "torch.func", "optree", "autoray", "torch.nn.utils.parametrize"],
    "tensorflow": ["numpy", "tensorflow", "optree", "autoray"],
}
IMPORTED["all"] = list(dict.fromkeys(name for names in IMPORTED.values() for name in names))
OUTPUT = Path(".mutants-output")
FAILED = Path(".mutants-failed")


class Chosen:
    """A plugin of pytest: of what is collected it runs the chosen tests, in their order, and notes
    how they went.
    """

    def __init__(self, tests: list[str] | None) -> None:
        self.tests = tests
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.tests is not None:
            found = {item.nodeid: item for item in items}
            items[:] = [found[name] for name in self.tests if name in found]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed or report.skipped:
            self.failed.append(report.nodeid)
            FAILED.write_text(report.nodeid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=IMPORTED)
    backend = parser.parse_args().backend
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a framework prints is no answer
    warnings.simplefilter("ignore")
    for name in IMPORTED[backend]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(_run(backend, json.loads(line))), file=answers, flush=True)


def _run(backend: str, job: dict[str, Any]) -> dict[str, Any]:
    FAILED.unlink(missing_ok=True)
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _tests(backend, job)
    status = _wait(child, start + job["limit"])
    failed = FAILED.read_text() if FAILED.exists() else ""
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "failed": failed}


def _wait(child: int, until: float) -> int | str:
    """The child's exit status: negative for a signal, and "timeout" where it was stopped."""
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            _end_what_it_started(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    _end_what_it_started(child)
    os.waitpid(child, 0)
    return "timeout"


def _end_what_it_started(child: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)


def _tests(backend: str, job: dict[str, Any]) -> None:
    """The child: pytest on the chosen tests, until one fails."""
    status = 3
    try:
        os.setsid()
        output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        warnings.resetwarnings()
        chosen = Chosen(job["tests"])
        tested = [name for name in IMPORTED if name != "all"] if backend == "all" else [backend]
        backends = [f"--backend={name}" for name in tested]
        status = int(pytest.main([*job["options"], *backends, *job["paths"]], plugins=[chosen]))
        if "report" in job:
            Path(job["report"]).write_text(
                json.dumps({"seconds": chosen.seconds, "failed": chosen.failed})
            )
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 (whatever it is, the child ends here)
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
