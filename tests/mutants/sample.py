"""Which mistakes are planted: of all that the operators can make, a seeded sample with some in
every file.

A mutant is known by its file, the text of its lines before and after, and its number among those
that read the same. So it stays the same mutant, in the sample and in the list of equivalent ones,
while other lines change.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from operators import family, operators

# the conformance cases are tests themselves
FOLDERS = ("cgshim", "cgshim/ops", "cgshim/host", "cgshim/testing", "backends/*", "backends/*/*")
LEAST_IN_A_FILE = 6
LEFT_OUT = ("strict", "maxsize")  # of zip, where it is an assertion of our own, and of a cache


@dataclass(frozen=True)
class Mutant:
    file: str
    operator: str
    occurrence: int  # of the operator in the file
    line: int
    last: int  # line of the statement that the line is in
    before: str
    after: str
    number: int  # of lines above it that read the same

    @property
    def name(self) -> str:
        return "\n".join([self.file, f"- {self.before}", f"+ {self.after}", str(self.number)])

    def source(self, text: str) -> str:
        """The file's text with the mistake in it."""
        mutated = mutate_code(text, operators()[self.operator], self.occurrence)
        assert mutated is not None
        return str(mutated)


def sample(root: Path, size: int, seed: int) -> list[Mutant]:
    """About `size` mutants: in each file in proportion to what can go wrong in it, and never fewer
    than some.
    """
    places = {file: _places((root / file).read_text()) for file in sources(root)}
    in_all = sum(map(len, places.values()))
    share = {
        file: max(LEAST_IN_A_FILE, round(size * len(found) / in_all))
        for file, found in places.items()
    }
    return [
        mutant
        for file in places
        for mutant in islice(_in_order(root, file, places[file], seed), share[file])
    ]


def sources(root: Path) -> list[str]:
    return sorted(
        str(path.relative_to(root)) for folder in FOLDERS for path in root.glob(f"{folder}/*.py")
    )


def _in_order(root: Path, file: str, places: list[Place], seed: int) -> Iterator[Mutant]:
    """The file's mutants in an order by hash, those that are the same text once."""
    text = (root / file).read_text()
    seen = set()
    for place in sorted(
        places, key=lambda place: _rank(seed, f"{file} {place.text} {place.number} {place.family}")
    ):
        operator, occurrence = place.mutation(seed)
        mutated = mutate_code(text, operators()[operator], occurrence)
        if mutated is None or mutated == text or not _compiles(mutated):
            continue
        change = _changed(text, mutated)
        first, last = _statement(text, change.line)
        mutant = Mutant(
            file, operator, occurrence, first, last, change.before, change.after, change.number
        )
        if mutant.name not in seen:
            seen.add(mutant.name)
            yield mutant


def _statement(text: str, line: int) -> tuple[int, int]:
    """The first and the last line of the statement that the line is in; of a compound one, of its
    head.
    """
    around = (line, line)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (last := _last_line(node)):
            around = (node.lineno, last)  # the innermost comes last
    return around


def _last_line(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    return max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno


@dataclass
class Place:
    """Where a family of operators can make its mistakes."""

    family: str
    text: str  # of the line
    number: int  # among the family's places on lines that read the same
    mutations: list[tuple[str, int]]  # operator and occurrence

    def mutation(self, seed: int) -> tuple[str, int]:
        """The one of them that is made."""
        first = self.mutations[0][1]
        return min(
            self.mutations, key=lambda one: _rank(seed, f"{self.text} {one[0]} {one[1] - first}")
        )


def _places(text: str) -> list[Place]:
    nodes, lines, left_out = list(ast_nodes(get_ast(text))), text.splitlines(), _left_out(text)
    found: dict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
    for name, operator in operators().items():
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, start in enumerate(starts):
            if start not in left_out:
                found[family(name), start].append((name, occurrence))
    alike: Counter[tuple[str, str]] = Counter()
    places = []
    for (kind, (line, _)), mutations in sorted(found.items()):
        of_line = lines[line - 1].strip()
        places.append(Place(kind, of_line, alike[kind, of_line], mutations))
        alike[kind, of_line] += 1
    return places


class _Change(NamedTuple):
    """What a mistake changes."""

    line: int
    before: str
    after: str
    number: int


def _changed(text: str, mutated: str) -> _Change:
    """The first line that differs; the lines before and after, each joined to one; how many such
    were above.
    """
    old, new = text.splitlines(), mutated.splitlines()
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    changes = [block for block in blocks if block[0] != "equal"]
    first, last = changes[0], changes[-1]
    was, line = _text(old[first[1] : last[2]]), first[1]
    while was and not old[line].strip():
        line += 1
    above = sum(each.strip() == old[line].strip() for each in old[:line])
    return _Change(line + 1, was, _text(new[first[3] : last[4]]), above)


def _text(lines: list[str]) -> str:
    return " ".join(stripped for line in lines if (stripped := line.strip()))


def _compiles(source: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


class _Spans:
    """Places that are left out."""

    def __init__(self, spans: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        self.spans = spans

    def __contains__(self, place: object) -> bool:
        return any(start <= place < end for start, end in self.spans)  # type: ignore[operator]


def _left_out(text: str) -> _Spans:
    """What no test can see: types, `__all__`, overloads, protocols, and some keywords."""
    return _Spans([_span(node) for node in _never_run(ast.parse(text))])


def _never_run(tree: ast.Module) -> Iterator[Any]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
            yield node.returns
        if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation is not None:
            yield node.annotation
        if _is_for_the_types(node) or (isinstance(node, ast.keyword) and node.arg in LEFT_OUT):
            yield node


def _is_for_the_types(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.ClassDef):
        return any("Protocol" in ast.unparse(base) for base in node.bases)
    if isinstance(node, ast.Assign):
        made = ast.unparse(node.value)
        return ast.unparse(node.targets[0]) == "__all__" or made.startswith(
            ("TypeVar(", "ParamSpec(")
        )
    return False


def _span(node: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """From a decorator's @ on, to the end."""
    first = [
        (decorator.lineno, decorator.col_offset - 1)
        for decorator in getattr(node, "decorator_list", [])
    ]
    return min([*first, (node.lineno, node.col_offset)]), (node.end_lineno, node.end_col_offset)


def _rank(seed: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
