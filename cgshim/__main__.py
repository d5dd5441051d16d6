"""python -m cgshim: list the backends, say which is chosen and why, and check that they conform."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from importlib import metadata
from typing import Any

from cgshim._dispatch import chosen_by, config_backend
from cgshim._errors import BackendError
from cgshim._registry import (
    aliases,
    command_to_install,
    entry_points,
    is_importable,
    load,
    owner_of,
    said,
)

HEADER = ("name", "plug_in", "framework", "state")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or run the conformance cases; return 1 if a required backend fails."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "conformance":
        from cgshim.testing.conformance._report import command  # it imports NumPy and every case

        return command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m cgshim", description=__doc__,
        epilog="conformance BACKEND runs the conformance cases of one backend: conformance --help",
    )  # fmt: skip
    parser.add_argument(
        "--load", action="store_true", help="import every framework, and say what works"
    )
    parser.add_argument(
        "--require", default="", metavar="NAMES", help="fail unless these backends work: jax,torch"
    )
    options = parser.parse_args(arguments)
    required = [name for name in options.require.split(",") if name]
    rows = backends(entry_points() if options.load else required)
    _print_table([HEADER, *rows])
    working = [name for name, *_, state in rows if state == "ok"]
    for name in working:
        _print_limits(name)
    print(f"chosen: {config_backend() or 'by call'}, by {chosen_by()}")
    missing = [name for name in required if name not in working]
    for name in missing:
        print(f"required, and not working here: {name}", file=sys.stderr)
    return int(bool(missing))


def backends(to_load: Collection[str]) -> list[tuple[str, str, str, str]]:
    """Return a row for each registered backend, after importing the backends in to_load."""
    rows = []
    for name, entry in entry_points().items():
        owner = "?" if entry.dist is None else f"{owner_of(entry)} {entry.dist.version}"
        roots = [name, *sorted(root for root, of in aliases().items() if of == name)]
        framework = " with ".join(map(_version, roots)) if is_importable(name) else "-"
        rows.append((name, f"{entry.value} ({owner})", framework, _state(name, name in to_load)))
    return rows


def _version(root: str) -> str:
    """Return the distribution that provides an import root, and its version."""
    if not is_importable(root):
        return f"no {root}"
    found = {root, *metadata.packages_distributions().get(root, ())}
    installed = [
        f"{dist.name} {dist.version}"
        for name in found
        for dist in metadata.distributions(name=name)
    ]
    return min(installed, default=f"{root} ?")


def _state(name: str, is_to_load: bool) -> str:
    if is_to_load:
        try:
            load(name)
        except BackendError as error:
            return str(error)
        return "ok"
    return (
        "found" if is_importable(name) else f"missing: {command_to_install(entry_points()[name])}"
    )


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in [rows[0], ["-" * width for width in widths], *rows[1:]]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def _print_limits(name: str) -> None:
    """Print the limits that the installed version of a framework adds, if its backend reports any."""
    backend: Any = load(name)
    try:
        for limit in getattr(backend, "version_limits", list)():
            print(f"{name}: {limit}")
    except Exception as error:  # noqa: BLE001  # a backend may be another library's code
        owner = owner_of(entry_points()[name])
        print(f"{name}: version_limits of {owner} failed, {said(error)}")


if __name__ == "__main__":
    sys.exit(main())
