"""Plants small mistakes in the package, one at a time, and counts those that the tests notice.

`nox -s mutants` takes about two hours on two cores, of which half an hour is spent on finding out
which tests reach which lines. Each verdict is kept as it is found: stopped, the session goes on
where it was, and a verdict is found anew when the mutant's file has changed. After a test was
written, `nox -s mutants -- --again` runs the survivors anew, and with `--tests
tests/front/test_new.py` against that file's tests alone, which takes seconds for each.

A mutant in a backend runs against the tests of that backend, one in the front end against NumPy's,
which start fastest, and then against the others'. A crash counts as killed, and so does a run that
does not end. The survivors that are equivalent to the package stand in equivalent.toml, each with
its reason.
"""

from __future__ import annotations

import argparse
import queue
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from reach import COMMON, Reach, reach
from sample import Mutant, sample
from trees import Tree, copy, told_apart
from verdicts import Verdicts, report

ROOT = Path(__file__).parents[2]
# in the order in which they start; all in one process
BACKENDS = ["numpy", "torch", "tensorflow", "jax", "all"]
FIRST = 25  # so many tests are collected and run first: most mutants go no further
# a line that so few tests run is run once, as its file is imported or for a cache: then those of
# its file run
FEW = 6
SECONDS_WITHOUT = 1200.0  # the longest that chosen tests may take on the code as it is
# of tests, the most telling ones; on the other backends, if NumPy's see nothing
SECONDS, ELSEWHERE = 60.0, 15.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "state", type=Path, help="the folder with the verdicts so far, and with copies of the tree"
    )
    parser.add_argument("--size", type=int, default=440, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--backend", action="append", dest="backends", choices=BACKENDS, help="its tests alone"
    )
    parser.add_argument("--only", default="", help="the files whose names hold this")
    parser.add_argument("--again", action="store_true", help="run survivors anew")
    parser.add_argument(
        "--tests", nargs="+", default=[], help="against these, instead of those that reach a line"
    )
    parser.add_argument(
        "--report", action="store_true", help="print what was found, and run nothing"
    )
    options = parser.parse_args()
    if missing := [path for path in options.tests if not (ROOT / path).exists()]:
        parser.error(f"no such tests: {', '.join(missing)}")
    state = options.state.resolve()
    # what changes from here on is not seen
    root = ROOT if options.report else copy(ROOT, state / "as-it-was")
    mutants = [
        mutant for mutant in sample(root, options.size, options.seed) if options.only in mutant.file
    ]
    verdicts = Verdicts(state / "verdicts.jsonl", root)
    if not options.report:
        trees = [Tree(copy(root, state / f"tree-{at}")) for at in range(options.workers)]
        session = Session(state, trees, verdicts, options.backends or BACKENDS, options.tests)
        session.run(_due(mutants, verdicts, options.again))
    sys.exit(not report(mutants, verdicts))


def _due(mutants: list[Mutant], verdicts: Verdicts, again: bool) -> list[Mutant]:
    def is_due(mutant: Mutant) -> bool:
        found = verdicts.of(mutant)
        return found is None or (again and found["verdict"] == "survived")

    return [mutant for mutant in mutants if is_due(mutant)]


class Session:
    """Workers, each with a copy of the tree."""

    def __init__(
        self,
        state: Path,
        trees: list[Tree],
        verdicts: Verdicts,
        backends: list[str],
        tests: list[str],
    ) -> None:
        self.state, self.verdicts, self.backends, self.tests = state, verdicts, backends, tests
        self.workers = len(trees)
        self.trees: queue.Queue[Tree] = queue.Queue()
        for tree in trees:
            self.trees.put(tree)
        self.reach: dict[str, Future[Reach]] = {}
        self.limit: dict[str, float] = {}
        """of the tests that were asked for, in seconds"""

    def run(self, mutants: list[Mutant]) -> None:
        with ThreadPoolExecutor(self.workers) as pool:
            judged = [
                future for last in self.backends for future in self._submit(pool, last, mutants)
            ]
            for at, done in enumerate(as_completed(judged), 1):
                print(f"{at}/{len(mutants)} {done.result()}", flush=True)
        while not self.trees.empty():
            self.trees.get().close()

    def _submit(self, pool: Executor, last: str, mutants: list[Mutant]) -> list[Future[str]]:
        """Have the mutants judged that need this backend last, after it was found what its tests
        reach.
        """
        if any(last in self._needed(mutant.file) for mutant in mutants):
            if self.tests:
                self._require_passing(last)
            else:
                self.reach[last] = pool.submit(self._reach, last)
        return [
            pool.submit(self._judged, mutant)
            for mutant in mutants
            if self._needed(mutant.file)[-1:] == [last]
        ]

    def _needed(self, file: str) -> list[str]:
        """The backends whose tests can reach a file, in the order in which they are asked."""
        own = [name for name in BACKENDS if f"cgshim_{name}" in file]
        return [name for name in self.backends if name in (own or BACKENDS)]

    def _require_passing(self, backend: str) -> None:
        tree = self.trees.get()
        for paths, tests, limit in self._given(backend):
            answer = tree.run(backend, paths, tests, limit, "-x")
            if answer["status"] != 0:
                raise SystemExit(
                    f"{answer['failed'] or self.tests} fails without a mistake in the package"
                )
            self.limit[backend] = 60 + 4 * answer["seconds"]  # longer than that is no end
        self.trees.put(tree)

    def _given(self, backend: str) -> list[tuple[list[str], None, float]]:
        """The tests that were asked for, but for those of other backends, as one run."""
        others = tuple(f"tests/{name}/" for name in BACKENDS if name != backend)
        paths = [path for path in self.tests if not path.startswith(others)]
        return [(paths, None, self.limit.get(backend, SECONDS_WITHOUT))] if paths else []

    def _reach(self, backend: str) -> Reach:
        tree = self.trees.get()
        try:
            tested = [*COMMON, "tests/conftest.py", "tests/gaps.py", f"tests/{backend}"]
            tested = [path for path in tested if (tree.at / path).exists()]
            same = told_apart(tree.at, ["cgshim", "backends", "examples", *tested])
            return reach(tree, backend, self.state / f"reach-{backend}-{same}.json")
        finally:
            self.trees.put(tree)

    def _judged(self, mutant: Mutant) -> str:
        tree = self.trees.get()
        start = time.monotonic()
        try:
            verdict = self._judge(tree, mutant)
        finally:
            self.trees.put(tree)
        verdict["seconds"] = round(time.monotonic() - start, 1)
        self.verdicts.add(mutant, verdict)
        return f"{verdict['verdict']} {verdict['seconds']:.0f} s {mutant.file}:{mutant.line} {verdict['by']}"

    def _judge(self, tree: Tree, mutant: Mutant) -> dict[str, Any]:
        """Plant the mistake, and run tests until one fails."""
        path = tree.at / mutant.file
        text = path.read_text()
        path.write_text(mutant.source(text))
        try:
            ran = 0
            for backend, paths, tests, limit in self._runs(mutant):
                answer = tree.run(backend, paths, tests, limit, "-x")
                if answer["status"] == 5:  # pytest: no tests ran
                    raise SystemExit(f"no test was run for {mutant}")
                if answer["status"] != 0:
                    return {
                        "verdict": "killed",
                        "by": answer["failed"] or f"{backend}: {answer['status']}",
                    }
                ran += len(tests or [])
            return {"verdict": "survived", "by": f"{ran} tests"}
        finally:
            path.write_text(text)

    def _runs(self, mutant: Mutant) -> Iterator[tuple[str, list[str], list[str] | None, float]]:
        """Runs of tests until one fails: backend, files, tests, seconds."""
        for backend in self._needed(mutant.file):
            if self.tests:
                yield from [(backend, *given) for given in self._given(backend)]
                continue
            found = self.reach[backend].result()
            chosen = self._chosen(backend, found, mutant)
            for tests in (chosen[:FIRST], chosen[FIRST:]):
                if tests:
                    paths = list(dict.fromkeys(test.partition("::")[0] for test in tests))
                    yield backend, paths, tests, 40 + 8 * sum(found.seconds[test] for test in tests)

    def _chosen(self, backend: str, found: Reach, mutant: Mutant) -> list[str]:
        """The tests that run the line, as many as there is time for."""
        lines = range(mutant.line, mutant.last + 1)
        tests = found.of_lines(mutant.file, lines)
        others = (self.reach[name].result() for name in self._needed(mutant.file))
        if len(tests) < FEW and not any(
            len(other.of_lines(mutant.file, lines)) >= FEW for other in others
        ):
            tests += [test for test in found.of_file(mutant.file) if test not in tests]
        taken, left = [], ELSEWHERE if backend != self._needed(mutant.file)[0] else SECONDS
        for test in tests:
            left -= found.seconds[test]
            if left < 0:
                break
            taken.append(test)
        return taken


if __name__ == "__main__":
    main()
