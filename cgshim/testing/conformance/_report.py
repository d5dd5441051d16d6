"""python -m cgshim conformance: print each case when it is done, and count the failures."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cgshim._errors import BackendError
from cgshim.testing.conformance._registry import Case, Result, cases, result_of


def command(arguments: Sequence[str]) -> int:
    """Run the requested cases, and print each one when it is done.

    Parameters
    ----------
    arguments : sequence of str
        The arguments of ``python -m cgshim conformance``.

    Returns
    -------
    int
        The exit status: 0 if none failed; 1 if one did, or there is no such backend; 2 if the
        arguments are wrong; 130 if it was interrupted.

    Examples
    --------
    >>> command(["numpy", "-k", "product_asked_twice"])
    case                 outcome
    product_asked_twice  passed
    numpy: 1 of 1 conformance cases passed
    0
    """
    options = _parser().parse_args(arguments)
    try:
        gaps = read_gaps(options.gaps) if options.gaps else {}
        chosen = [
            case
            for case in cases(options.name, gaps=gaps)
            if matches(options.expression, case.name)
        ]
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if not chosen:
        print(
            f"no conformance case matches {options.expression!r}; see their names without -k",
            file=sys.stderr,
        )
        return 2
    return _print_each(options.name, chosen)


def _parser() -> ArgumentParser:
    description = "Run the conformance cases of one backend."
    parser = ArgumentParser(prog="python -m cgshim conformance", description=description)
    parser.add_argument("name", help="the framework's import root")
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPRESSION",
        help="only cases whose names contain these words: 'host', 'complex and not forward', 'vmap or jvp'",
    )  # fmt: skip
    parser.add_argument(
        "--gaps", type=Path, metavar="FILE",
        help="known gaps, one a line: case = reason; one that passes is a failure",
    )  # fmt: skip
    return parser


def read_gaps(path: Path) -> dict[str, str]:
    """Return the gaps in a file of lines ``case = reason``, which may be quoted, as in TOML.

    Raises
    ------
    ValueError
        If a line has another form, or a case has two lines.
    """
    gaps: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, reason = (part.strip().strip('"') for part in line.partition(" = "))
        if not (name and reason):
            raise ValueError(
                f"{path}:{number}: a known gap must be written as case = reason, got {line.strip()!r}"
            )
        if name in gaps:
            raise ValueError(
                f"{path}:{number}: a known gap must have one reason, got another for {name}"
            )
        gaps[name] = reason
    return gaps


def matches(expression: str, name: str) -> bool:
    """Return True if a name matches an expression of words with `or`, `and` and `not`."""
    return any(
        all(_contains(name, word) for word in part.split(" and "))
        for part in expression.split(" or ")
    )


def _contains(name: str, word: str) -> bool:
    word = word.strip()
    if word.startswith("not "):
        return not _contains(name, word.removeprefix("not "))
    return word.lower() in name.lower()


def _print_each(name: str, chosen: Sequence[Case]) -> int:
    """Print a row for each case; print the name first, because the case may crash Python."""
    width = max(len(case.name) for case in chosen)
    print(f"{'case'.ljust(width)}  outcome")
    results: list[Result] = []
    try:
        for case in chosen:
            print(case.name.ljust(width), end="  ", flush=True)
            results.append(result_of(case))
            print(_as_text(results[-1]), flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        _print_summary(name, results, len(chosen))
        return 130
    return _print_summary(name, results, len(chosen))


def _as_text(result: Result) -> str:
    text = f"{result.outcome}: {result.reason}" if result.reason else result.outcome
    return f"{text} ({result.place})" if result.place else text


def _print_summary(name: str, results: Sequence[Result], total: int) -> int:
    outcomes = Counter(result.outcome for result in results)
    failures = [result for result in results if result.outcome == "failed"]
    first_places = {result.reason: result.place for result in reversed(failures)}
    if failures:
        print(f"\ndistinct reasons of {len(failures)} failures: {len(first_places)}")
    for reason, count in Counter(result.reason for result in failures).most_common():
        print(f"{count:6}  {reason} (first at {first_places[reason]})")
    rest = {
        "known gaps": outcomes["gap"],
        "failed": outcomes["failed"],
        "not run": total - len(results),
    }
    counted = [f"{what}: {count}" for what, count in rest.items() if count]
    print(
        "; ".join([f"{name}: {outcomes['passed']} of {total} conformance cases passed", *counted])
    )
    return 1 if failures else 0
