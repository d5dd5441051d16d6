"""Which tests reach which lines, found once for each backend: its tests run with pytest-cov on the
code as it is.

Tests that fail there, or that are skipped, are not used: nothing could be said of a mutant that
they fail on.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData
from trees import Tree

# Where the tests of every backend are. Not here: how fast the package is, and whole programs, slow
# ones.
COMMON = ["tests/conformance", "tests/front", "tests/ops", "tests/test_messages.py"]
OF_MIXED_FRAMEWORKS = ["tests/front", "tests/test_messages.py"]
SECONDS = 1800.0
_COMPILED = (
    "tests/torch/test_torch_compile.py",
    "tests/torch/test_torch_compiled_calls.py",
    "tests/torch/test_torch_host_programs.py",
)
UNSEEN = {
    "backends/cgshim_torch/_compile/calls.py": _COMPILED,
    "backends/cgshim_torch/_compile/trees.py": _COMPILED,
    "backends/cgshim_torch/_host/compiled.py": _COMPILED,
    "cgshim/__init__.py": ("tests/front/test_imports.py",),
    "cgshim/__main__.py": ("tests/front/test_main.py", "tests/front/test_plug_ins.py"),
}
"""Files whose code runs where coverage does not see it, and the tests that do so: under Dynamo, in a process."""


@dataclass
class Reach:
    """What one backend's tests reach."""

    seconds: dict[str, float]  # of each test that passes
    tests: dict[str, dict[int, list[str]]]  # of each file, for each line
    size: Counter[str]  # how many lines a test reaches

    def of_lines(self, file: str, lines: range) -> list[str]:
        """The tests that run one of these lines, the most telling ones first."""
        reached = self.tests.get(file, {})
        unseen = [test for test in self.seconds if test.partition("::")[0] in UNSEEN.get(file, ())]
        return self._ordered(
            {test for line in lines for test in reached.get(line, [])}.union(unseen)
        )

    def of_file(self, file: str) -> list[str]:
        """The tests that run any line of the file: those of a line that runs as the file is
        imported.
        """
        return self._ordered(
            {test for tests in self.tests.get(file, {}).values() for test in tests}
        )

    def _ordered(self, tests: set[str]) -> list[str]:
        """Quick ones that reach little else come first."""
        return sorted(tests, key=lambda test: (self.size[test] * (0.2 + self.seconds[test]), test))


def reach(tree: Tree, backend: str, stored: Path) -> Reach:
    """As stored, or found anew and stored."""
    if not stored.exists():
        stored.write_text(json.dumps(_find(tree, backend)))
    found = json.loads(stored.read_text())
    names = list(found["seconds"])
    tests = {
        file: {int(line): [names[at] for at in by] for line, by in lines.items()}
        for file, lines in found["lines"].items()
    }
    size = Counter(name for lines in tests.values() for by in lines.values() for name in by)
    return Reach(found["seconds"], tests, size)


def _find(tree: Tree, backend: str) -> dict[str, object]:
    paths = OF_MIXED_FRAMEWORKS if backend == "all" else [*COMMON, f"tests/{backend}"]
    report, data = tree.at / "report.json", tree.at / ".coverage"
    options = ["--cov=cgshim", "--cov=backends", "--cov-context=test", "--cov-report="]
    answer = tree.run(backend, paths, None, SECONDS, *options, report=str(report))
    if answer["status"] not in (0, 1):
        raise SystemExit(f"the tests of {backend} do not run: see {tree.at / '.mutants-output'}")
    ran = json.loads(report.read_text())
    passed = {
        name: round(time, 3) for name, time in ran["seconds"].items() if name not in ran["failed"]
    }
    print(
        f"{backend}: {len(passed)} tests in {answer['seconds']:.0f} s, and {len(ran['failed'])} left out",
        flush=True,
    )
    return {
        "seconds": passed,
        "lines": _by_line(tree.at, data, list(passed)),
        "left out": ran["failed"],
    }


def _by_line(root: Path, stored: Path, passed: list[str]) -> dict[str, dict[int, list[int]]]:
    """For each file and line the tests, as their numbers."""
    number = {name: at for at, name in enumerate(passed)}
    data = CoverageData(str(stored))
    data.read()
    return {
        str(Path(path).relative_to(root)): {
            line: sorted({number[name] for name in _without_phase(contexts) if name in number})
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in sorted(data.measured_files())
    }


def _without_phase(contexts: list[str]) -> list[str]:
    """Names of tests: pytest-cov adds whether it was set up, run or torn down; nothing has no name."""
    return [context.rpartition("|")[0] for context in contexts]
