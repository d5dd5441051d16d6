"""python -m cgshim: which backends there are, which is chosen and why, and whether they conform."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Collection, Sequence
from importlib.metadata import packages_distributions, version
from typing import Any, NamedTuple

from cgshim._dispatch import chosen_by, config_backend
from cgshim._errors import BackendError
from cgshim._installed import (
    Entry,
    command_to_install,
    is_importable,
    project_of,
    registered,
    requirement_of,
    said,
)
from cgshim._registry import load


class Row(NamedTuple):
    """What the table says of a registered backend."""

    name: str
    plug_in: str
    framework: str
    supported: str
    state: str

    @property
    def works(self) -> bool:
        """True if the backend was loaded."""
        return self.state == "ok"


def backends(to_load: Collection[str]) -> list[Row]:
    """Return a row for each registered backend, after the import of those that are to be loaded."""
    return [
        Row(
            name,
            f"{entry.value} ({entry.owner} {_version(entry.owner)})",
            _framework(entry),
            requirement_of(entry)[0] or "-",
            _state(entry, name in to_load),
        )
        for name, entry in registered().backends.items()
    ]


def _framework(entry: Entry) -> str:
    """Return the framework's distribution and its version, and those of the import roots that
    belong to it.
    """
    if not is_importable(entry.name):
        return "-"
    aliases = sorted(root for root, name in registered().aliases.items() if name == entry.name)
    aliased = [_distribution(root) if is_importable(root) else f"no {root}" for root in aliases]
    return " with ".join(
        [_distribution(entry.name, project_of(requirement_of(entry)[0])), *aliased]
    )


def _distribution(root: str, project: str = "") -> str:
    """Return the distribution with an import root, and its version: it often is named as the root."""
    for name in (project, root):
        if name and (installed := _version(name)) != "?":
            return f"{name} {installed}"
    name = _distribution_with(root)
    return f"{name} {_version(name)}" if name else "?"


def _version(name: str) -> str:
    """Return the version of a distribution; "?" if there is none, or its metadata cannot be read."""
    with contextlib.suppress(Exception):
        return version(name) or "?"
    return "?"


def _distribution_with(root: str) -> str:
    """Return the name of the distribution that has installed an import root; "" if none tells."""
    with contextlib.suppress(Exception):
        return packages_distributions()[root][0]
    return ""


def _state(entry: Entry, is_to_load: bool) -> str:
    if entry.fault is not None:
        return entry.fault
    if is_to_load:
        try:
            load(entry.name)
        except BackendError as error:
            return str(error)
        return "ok"
    if is_importable(entry.name):
        return "found"
    return f"missing: {command_to_install(entry) or f'install what is imported as {entry.name}'}"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def _print_backends(to_load: Collection[str], required: Sequence[str]) -> bool:
    """Print the backends, what is ignored, and the choice; return True if all required ones work."""
    rows = backends(to_load)
    _print_table(Row._fields, rows)
    for entry in registered().ignored:
        print(entry.fault)
    for row in rows:
        if row.works:
            _print_limits(row.name)
    print(f"chosen: {config_backend() or 'by call'}, by {chosen_by()}")
    working = {row.name for row in rows if row.works}
    missing = [name for name in required if name not in working]
    for name in missing:
        print(f"required, and not working here: {name}", file=sys.stderr)
    return not missing


def _print_limits(name: str) -> None:
    """Print what only other versions of a loaded framework can, if its backend tells."""
    backend: Any = load(name)
    try:
        for limit in getattr(backend, "version_limits", list)():
            print(f"{name}: {limit}")
    except Exception as error:  # noqa: BLE001  # a plug-in is others' code
        owner = registered().backends[name].owner
        print(f"{name}: version_limits of {owner} failed, {said(error)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is asked for; return 1 if something required is missing or does not conform, else
    0.
    """
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
    to_load = registered().backends if options.load else required
    return 0 if _print_backends(to_load, required) else 1


if __name__ == "__main__":
    sys.exit(main())
