"""python -m cgshim: which backends there are, which is chosen and why, and whether they conform."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from typing import NamedTuple

from cgshim._choice import chosen_by, config_backend
from cgshim._errors import BackendError
from cgshim._registry import entry_points, load


class Row(NamedTuple):
    """What the table says of a registered backend."""

    name: str
    plug_in: str
    framework: str
    state: str

    @property
    def works(self) -> bool:
        """True if the backend can be used here."""
        return self.state == "ok"


def backends() -> list[Row]:
    """Return a row for each registered backend, after trying to import each one's framework."""
    return [Row(name, _plug_in(name), _framework(name), _state(name)) for name in entry_points()]


def _plug_in(name: str) -> str:
    point = entry_points()[name]
    return f"{point.value} ({point.dist.name} {point.dist.version})" if point.dist else point.value


def _framework(name: str) -> str:
    distributions = importlib.metadata.packages_distributions().get(name, [])
    return ", ".join(f"{d} {importlib.metadata.version(d)}" for d in sorted(set(distributions))) or "-"


def _state(name: str) -> str:
    try:
        load(name)
    except BackendError as error:
        return str(error)
    return "ok"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _choice() -> str:
    return f"chosen: {config_backend() or 'by call'}, by {chosen_by()}"


def _print_backends(require: str) -> bool:
    """Print the backends; return True if all required ones work."""
    rows = backends()
    _print_table(Row._fields, rows)
    print(_choice())
    working = {row.name for row in rows if row.works}
    missing = [name for name in filter(None, require.split(",")) if name not in working]
    for name in missing:
        print(f"required, and not working here: {name}", file=sys.stderr)
    return not missing


def _print_conformance(name: str) -> bool:
    """Print the result of each conformance case; return True if none failed."""
    from cgshim.testing import conformance

    results = conformance.run(name)
    _print_table(conformance.Result._fields, results)
    failed = sum(result.outcome == "failed" for result in results)
    print(f"{name}: {len(results) - failed} of {len(results)} conformance cases passed")
    return not failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for; return 1 if something required is missing or does not conform, else 0."""
    parser = argparse.ArgumentParser(prog="python -m cgshim", description=__doc__)
    parser.add_argument("--require", default="", metavar="NAMES", help="fail unless these backends work: jax,torch")
    commands = parser.add_subparsers(dest="command", metavar="conformance")
    conformance = commands.add_parser("conformance", help="run the conformance cases of one backend")
    conformance.add_argument("name", help="the framework's import root")
    options = parser.parse_args(arguments)
    try:
        good = _print_conformance(options.name) if options.command else _print_backends(options.require)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
