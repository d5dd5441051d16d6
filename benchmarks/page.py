"""Write docs/performance.md: the text of performance.md beside this file, and tables of the results.

A table that was not measured this time stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.cases import EVERYWHERE, Case
from benchmarks.measure import Medians

TEXT = Path(__file__).parent / "performance.md"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TABLES = ("programs", "functions", "calls")
HEADER = "| backend | case | by hand | cgshim | target | | Keras |\n|---|---|--:|--:|--:|---|--:|"
OF_PROGRAMS = "| program | framework | by hand | cgshim | ratio |\n|---|---|--:|--:|--:|"
OF_FUNCTIONS = "| function | numpy | jax | torch | tensorflow |\n|---|--:|--:|--:|--:|"
OF_CALLS = "| case | numpy | jax | torch | tensorflow |\n|---|--:|--:|--:|--:|"
HEADERS = {"programs": OF_PROGRAMS, "functions": OF_FUNCTIONS, "calls": OF_CALLS}
RATIO, MICROSECONDS = 1.5, 0.5
"""what a function of cgshim.ops should not exceed: so many times the framework's own, and so much"""

Result = tuple[str, Case, Medians]


def write(
    results: Sequence[Result], tables: Sequence[str], about: str, further: Sequence[str]
) -> None:
    """Write the page with these tables; the others stay."""
    before = PAGE.read_text()
    rows = {"programs": _programs, "functions": _functions, "calls": _calls}
    blocks = {}
    for name in TABLES:
        if name in tables:
            own = [result for result in results if result[1].table == name]
            body = rows[name](own)
            measured = " ".join([f"Measured {about}.", *(further if name == "calls" else [])])
            blocks[name] = "\n".join([f"{measured}\n", HEADERS[name], *body])
        else:
            blocks[name] = _found(before, name)
    PAGE.write_text(TEXT.read_text().format(**blocks))


def _found(page: str, name: str) -> str:
    """Return a table of the page with the line before it, which says where it was measured."""
    block = rf"^Measured [^\n]*\n\n{re.escape(HEADERS[name])}(\n\|[^\n]*)*"
    found = re.search(block, page, re.MULTILINE)
    if found is None:
        raise SystemExit(f"{PAGE} has no table of {name}: measure it too")
    return found[0]


# --- The rows of each table -----------------------------------------------------------------------


def _programs(results: Iterable[Result]) -> list[str]:
    ordered = sorted(results, key=lambda result: result[1].name)
    return [
        f"| {case.name} | {backend} | {in_units(measured['by hand']['median'])} | "
        f"{in_units(measured['cgshim']['median'])} | {measured['cgshim']['ratio']:.2f} |"
        for backend, case, measured in ordered
    ]


def _functions(results: Iterable[Result]) -> list[str]:
    """Return one row a function, with the ratio in bold if it is more than it should be."""
    return _rows(results, lambda name: f"`{name}`", _exceeds_limit)


def _calls(results: Iterable[Result]) -> list[str]:
    """Return one row a case, with the ratio in bold if it misses its target."""
    return _rows(results, str, _misses_target)


def _rows(
    results: Iterable[Result],
    title: Callable[[str], str],
    is_bold: Callable[[str, Case, Medians], bool],
) -> list[str]:
    by_name: dict[str, dict[str, str]] = {}
    for backend, case, measured in results:
        ratio = f"{measured['cgshim']['ratio']:.2f}"
        bold = f"**{ratio}**" if is_bold(backend, case, measured) else ratio
        keras = f" (Keras {measured['keras']['ratio']:.2f})" if "keras" in measured else ""
        by_name.setdefault(case.name, {})[backend] = f"{amount(case, measured)}, {bold}{keras}"
    return [
        f"| {title(name)} | {' | '.join(row.get(backend, '') for backend in EVERYWHERE)} |"
        for name, row in by_name.items()
    ]


def _exceeds_limit(backend: str, case: Case, measured: Medians) -> bool:
    own, ratio = measured["by hand"]["median"], measured["cgshim"]["ratio"]
    return ratio * own > RATIO * own + MICROSECONDS * 1e-6


def _misses_target(backend: str, case: Case, measured: Medians) -> bool:
    target = case.targets.get(backend)
    return target is not None and round(measured["cgshim"]["ratio"], 2) > target


def row(backend: str, case: Case, measured: Medians) -> str:
    keras = f"{measured['keras']['ratio']:.2f}" if "keras" in measured else ""
    ratio, target = measured["cgshim"]["ratio"], case.targets.get(backend)
    return cells(backend, case.name, amount(case, measured), ratio, target, keras)


def cells(
    backend: str, name: str, by_hand: str, got: float, target: float | None, keras: str
) -> str:
    verdict = "" if target is None else "met" if round(got, 2) <= target else "missed"
    return f"| {backend} | {name} | {by_hand} | {got:.2f} | {target or ''} | {verdict} | {keras} |"


def amount(case: Case, measured: Medians) -> str:
    by_hand = measured["by hand"]["median"]
    return f"{by_hand / 1e6:.0f}\u00a0MB" if case.measured == "peaks" else in_units(by_hand)


def in_units(seconds: float) -> str:
    """Return a time with its unit, which no line's end divides."""
    return f"{seconds * 1e6:.1f}\u00a0us" if seconds < 1e-3 else f"{seconds * 1e3:.1f}\u00a0ms"
