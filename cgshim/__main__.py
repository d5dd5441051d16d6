"""python -m cgshim: load the backends and say which one is chosen and why, or check one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cgshim._dispatch import chosen_by, config_backend
from cgshim._errors import BackendError
from cgshim._registry import entry_points, load, owner_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or run the conformance cases; return 1 if a named backend does not work."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == "conformance":
        from cgshim.testing.conformance._report import command  # it imports NumPy and every case

        return command(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m cgshim", description=__doc__,
        epilog="conformance BACKEND runs the conformance cases of one backend: conformance --help",
    )  # fmt: skip
    parser.add_argument(
        "names", nargs="*", help="backends that must work; by default all are tried"
    )
    names = parser.parse_args(arguments).names
    states = {name: _state(name) for name in names or entry_points()}
    for name, (_, text) in states.items():
        print(f"{name:12}{text}")
    print(f"chosen: {config_backend() or 'by call'}, by {chosen_by()}")
    return int(bool(names) and not all(works for works, _ in states.values()))


def _state(name: str) -> tuple[bool, str]:
    """Return whether a backend loads, and what it and its framework are, or the error."""
    try:
        load(name)
    except BackendError as error:
        return False, str(error)
    entry, framework = entry_points()[name], sys.modules[name]
    version = getattr(framework, "__version__", "?")
    return True, f"ok: {entry.value} of {owner_of(entry)}, with {name} {version}"


if __name__ == "__main__":
    sys.exit(main())
