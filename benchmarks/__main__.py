"""Measures cgshim against code by hand on every backend, prints the table, and writes
docs/performance.md.

`python -m benchmarks --quick` takes some minutes, and writes nothing. `--table programs` measures
and writes one of the page's tables alone. `--against ../before` compares this checkout with
another, in turns: the last column is the ratio to code by hand here for one there, which is steadier
than the times of two processes. A case that one of the two cannot run is left out, in words.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks import page
from benchmarks.cases import CASES, EVERYWHERE, MILLISECONDS_OF_IMPORT, OPS_OF_A_MODULE
from benchmarks.ops import cube
from benchmarks.turns import measured_in_turns
from cgshim import op_custom_gradient

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",  # with it TensorFlow hands no memory back, and a peak shows once
}
COMPARED = "| backend | case | by hand | there | here | here / there |\n|---|---|--:|--:|--:|--:|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a fifth of a second a case, and no report"
    )
    parser.add_argument("--backend", action="append", dest="backends", choices=EVERYWHERE)
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    parser.add_argument(
        "--table", action="append", dest="tables", choices=page.TABLES,
        help="measure this table of the page alone, and leave the others as they are",
    )  # fmt: skip
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="another cgshim; no report"
    )
    options = parser.parse_args()
    backends, seconds = options.backends or EVERYWHERE, 0.2 if options.quick else 1.0
    tables = options.tables or page.TABLES
    if options.against:
        other = options.against.resolve(strict=True)
        _compare(other, backends, seconds, options.only, tables)
        return
    results = _results(backends, seconds, options.only, tables)
    further = [] if options.only or "calls" not in tables else [*_facts_of_python()]
    print("\n".join(further))
    if not (options.quick or options.backends or options.only):
        page.write(results, tables, _about(), further)


def _results(
    backends: tuple[str, ...], seconds: float, only: str, tables: Sequence[str]
) -> list[page.Result]:
    """Measure the cases of these tables, print a row of each, and return what was measured."""
    print(page.HEADER)
    results = []
    for backend in backends:
        for at, measured in _measured(backend, seconds, only, tables):
            results.append((backend, CASES[at], measured))
            print(page.row(*results[-1]), flush=True)
    return results


def _facts_of_python() -> Iterator[str]:
    yield _import_time()
    yield _bytes_of_plans()


def _compare(
    other: Path, backends: tuple[str, ...], seconds: float, only: str, tables: Sequence[str]
) -> None:
    print(COMPARED)
    for backend in backends:
        arguments = [backend, "--seconds", str(seconds), "--only", only, "--tables", *tables]
        for at, here, there in measured_in_turns(
            (HERE.parent, other), arguments, _environment(backend)
        ):
            if isinstance(here, str):
                print(f"| {backend} | {CASES[at].name} | left out: {here} |", flush=True)
                continue
            before, now = there["cgshim"]["ratio"], here["cgshim"]["ratio"]
            cells = backend, CASES[at].name, page.amount(CASES[at], here)
            ratios = f"{before:.2f} | {now:.2f} | {now / before:.2f}"
            print(f"| {' | '.join(cells)} | {ratios} |", flush=True)


def _measured(
    backend: str, seconds: float, only: str, tables: Sequence[str]
) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    """What a process of its own measures for a backend."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.worker",
        backend,
        "--seconds",
        str(seconds),
        "--only",
        only,
        "--tables",
        *tables,
    ]
    with subprocess.Popen(
        command, env=_environment(backend), stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        yield from map(json.loads, worker.stdout)
    if worker.returncode:
        raise SystemExit(f"the measurements of {backend} failed")


def _environment(backend: str) -> dict[str, str]:
    # on NumPy its custom_gradient has no gradient
    keras = {} if backend == "numpy" else {"KERAS_BACKEND": backend}
    return os.environ | ENVIRONMENT | keras


def _import_time() -> str:
    """Measure the processor time of `import cgshim` beyond Python's own start."""
    taken = [(_seconds_of("import cgshim"), _seconds_of("pass")) for _ in range(41)]
    with_import, without = map(min, zip(*taken, strict=True))
    milliseconds = 1e3 * (with_import - without)
    return f"`import cgshim` takes {milliseconds:.1f} ms (target {MILLISECONDS_OF_IMPORT})."


def _bytes_of_plans() -> str:
    """Measure the bytes that an op caches at its first call, for a module of ops."""
    x = np.array(0.7)
    ops = [op_custom_gradient(cube) for _ in range(OPS_OF_A_MODULE)]
    op_custom_gradient(cube)(x)  # once, for whatever is imported on first use
    tracemalloc.start()
    for op in ops:
        op(x)
    gc.collect()
    remembered, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return f"An op keeps {remembered / OPS_OF_A_MODULE:.0f} bytes for its calls."


def _seconds_of(code: str) -> float:
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment
    )  # as installed: compiled once, not each time
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _about() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _MEASURED)
    machine = f"{_processor()}, {os.cpu_count()} cores, {platform.system()}"
    return f"{datetime.date.today()}: {machine}; Python {platform.python_version()}; {versions}"


_MEASURED = ("cgshim", "numpy", "autograd", "jax", "torch", "tensorflow-cpu", "keras", "optree")


def _processor() -> str:
    """The processor's name, where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )


if __name__ == "__main__":
    main()
