"""The process that measures one backend: it prints a line of JSON a case."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from collections.abc import Callable
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.measure import Medians, peaks, times
from benchmarks.ops import BY_CGSHIM, arguments, by_keras
from benchmarks.page import TABLES
from benchmarks.turns import Turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a case is timed")
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    parser.add_argument("--tables", nargs="+", default=TABLES, help="the cases of these tables")
    parser.add_argument(
        "--turns", nargs=3, default=None, help="measure in turns with another process"
    )
    options = parser.parse_args()
    turns = Turns(*options.turns) if options.turns else None
    framework = importlib.import_module(f"benchmarks.with_{options.backend}")
    for at, case in enumerate(CASES):
        is_by_hand = case.op in framework.BY_HAND or (case.op, case.use) in framework.BY_HAND
        is_asked_for = options.only in case.name and case.table in options.tables
        if is_by_hand and hasattr(framework, case.use) and is_asked_for:
            measured = _measured(framework, case, options.seconds, turns)
            print(json.dumps([at, measured]), flush=True)


def _measured(framework: Any, case: Case, seconds: float, turns: Turns | None) -> Medians | str:
    """The medians; of two checkouts, one of which does not have what the case needs, why not."""
    working: dict[str, Callable[[], Any]] = {}
    problem = ""
    try:
        sides = {name: _ready(framework, case, op) for name, op in _sides(framework, case).items()}
        working = {name: run for name, run in sides.items() if run is not None}
    except Exception as error:
        if turns is None:
            raise
        problem = repr(error)
    if turns and (problem := turns.problem_of_either(problem)):
        return problem
    if case.measured == "peaks":
        return peaks(working, "by hand", turns or range)
    return times(working, "by hand", seconds, turns or range)


def _sides(framework: Any, case: Case) -> dict[str, Callable[..., Any]]:
    by_hand = framework.BY_HAND
    sides = {
        "by hand": by_hand.get((case.op, case.use)) or by_hand[case.op],
        "cgshim": BY_CGSHIM[case.op],
    }
    if "KERAS_BACKEND" in os.environ and case.op in (keras := by_keras()):
        sides["keras"] = keras[case.op]
    return sides


def _ready(framework: Any, case: Case, op: Callable[..., Any]) -> Callable[[], Any] | None:
    """The case as a function without arguments; None where the op is Keras's, and does not work
    here.
    """
    try:
        use = getattr(framework, case.use)
        run = use(op, *arguments(case.op, lambda: framework.tensor(case.size), case.width))
        run()  # once, for whatever is imported or compiled on first use
    except Exception:
        if op is BY_CGSHIM[case.op] or op in framework.BY_HAND.values():
            raise
        return None
    return run


if __name__ == "__main__":
    main()
