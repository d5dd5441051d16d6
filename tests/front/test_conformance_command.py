"""python -m cgshim conformance: what it prints while the cases run, and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cgshim.__main__ import main
from cgshim.testing import conformance
from cgshim.testing.conformance import _registry
from cgshim.testing.conformance._report import matches, read_gaps

A_CASE = "product_asked_twice"
ANOTHER = "same_tensor_twice"
GAPS_FILE = f"""\
# what does not work yet
{A_CASE} = upstream issue 12 = 13

"dtypes[float16]" = "as TOML writes it"
"""


def run(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after some code."""
    script = f"{code}\nfrom cgshim.__main__ import main\nraise SystemExit(main({['conformance', *arguments]!r}))"
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )


@pytest.fixture
def cases_named(monkeypatch):
    """Other cases than the registered ones."""
    return lambda **bodies: monkeypatch.setattr(_registry, "_bodies", bodies)


def passes(framework: conformance.Framework) -> None:
    """A case that nothing can fail."""


def test_each_row_is_printed_before_and_after_its_case(capsys, cases_named):
    seen = []
    cases_named(
        first=lambda _: seen.append(capsys.readouterr().out),
        second=lambda _: seen.append(capsys.readouterr()),
    )
    assert main(["conformance", "numpy"]) == 0
    assert seen[0] == "case    outcome\nfirst   "
    assert seen[1].out == "passed\nsecond  "
    assert capsys.readouterr().out == "passed\nnumpy: 2 of 2 conformance cases passed\n"


CRASH = """
import os
from cgshim.testing.conformance._registry import case

@case()
def a_case_that_ends_python(framework):
    os.abort()
"""


def test_a_crash_loses_no_row_and_leaves_the_name_of_its_case():
    done = run("numpy", "-k", f"{A_CASE} or a_case_that_ends", code=CRASH)
    assert done.returncode < 0
    *_, before, last = done.stdout.splitlines()
    assert before.split() == [A_CASE, "passed"]
    assert last.split() == ["a_case_that_ends_python"]


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("", ["a complex sum", "a sum", "forward_mode"]),
        ("SUM", ["a complex sum", "a sum"]),
        ("sum and not complex", ["a sum"]),
        ("complex sum or forward", ["a complex sum", "forward_mode"]),
        ("not sum and not forward", []),
    ],
)
def test_k_selects_by_words(expression, chosen):
    assert [
        name for name in ("a complex sum", "a sum", "forward_mode") if matches(expression, name)
    ] == chosen


def test_nothing_selected_is_an_error(capsys):
    assert main(["conformance", "numpy", "-k", "no_such_case"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "no conformance case matches 'no_such_case'; see their names without -k\n"
    assert printed.out == ""


def test_gaps_are_read_with_and_without_quotes(tmp_path):
    file = tmp_path / "gaps.toml"
    file.write_text(GAPS_FILE)
    assert read_gaps(file) == {
        A_CASE: "upstream issue 12 = 13",
        "dtypes[float16]": "as TOML writes it",
    }


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("a_case", ":2: a known gap must be written as case = reason, got 'a_case'"),
        ("a_case = ", ":2: a known gap must be written as case = reason, got 'a_case ='"),
        (
            f"{A_CASE} = once more",
            f":2: a known gap must have one reason, got another for {A_CASE}",
        ),
        ("no_such_case = missing", "the table of gaps names cases that do not exist: no_such_case"),
    ],
)
def test_a_wrong_line_of_gaps(tmp_path, capsys, line, text):
    file = tmp_path / "gaps.toml"
    file.write_text(f"{A_CASE} = upstream issue\n{line}\n")
    assert main(["conformance", "numpy", "--gaps", str(file)]) == 2
    assert capsys.readouterr().err == (f"{file}{text}\n" if text.startswith(":") else f"{text}\n")


def test_a_file_of_gaps_that_is_missing(capsys, tmp_path):
    assert main(["conformance", "numpy", "--gaps", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_a_known_gap_is_no_failure_and_one_that_passes_is(tmp_path, capsys, cases_named):
    def fails(framework: conformance.Framework) -> None:
        raise SystemExit(3)

    cases_named(fails=fails, passes=passes)
    file = tmp_path / "gaps"
    file.write_text("fails = upstream issue 12\n")
    assert main(["conformance", "numpy", "--gaps", str(file)]) == 0
    *_, row, _, summary = capsys.readouterr().out.splitlines()
    assert row == "fails   gap: upstream issue 12"
    assert summary == "numpy: 1 of 2 conformance cases passed; known gaps: 1"
    file.write_text("passes = upstream issue 12\n")
    assert main(["conformance", "numpy", "-k", "passes", "--gaps", str(file)]) == 1
    assert (
        "passes passes on numpy: take it off the table of gaps (upstream issue 12)"
        in capsys.readouterr().out
    )


def raises_in_the_backend(framework: conformance.Framework) -> None:
    framework.backend.convert_to_tensor(1.0, "no_such_dtype")


def raises_in_two_lines(framework: conformance.Framework) -> None:
    raise ValueError("one\n  two")


def asserts_without_a_message(framework: conformance.Framework) -> None:
    raise AssertionError  # its source is the reason


def test_reasons_are_one_line_each_and_are_counted(capsys, cases_named):
    cases_named(
        a=raises_in_two_lines,
        b=raises_in_two_lines,
        c=asserts_without_a_message,
        d=raises_in_the_backend,
    )
    assert main(["conformance", "numpy"]) == 1
    _, *rows, empty, count, most, _, _, summary = capsys.readouterr().out.splitlines()
    line = raises_in_two_lines.__code__.co_firstlineno + 1
    assert rows[0] == f"a  failed: ValueError: one two ({__file__}:{line})"
    assert "failed: AssertionError: raise AssertionError # its source is the reason (" in rows[2]
    assert rows[3].partition("cgshim_numpy/__init__.py:")[1]
    assert (empty, count) == ("", "distinct reasons of 4 failures: 3")
    assert most == f"     2  ValueError: one two (first at {__file__}:{line})"
    assert summary == "numpy: 0 of 4 conformance cases passed; failed: 4"


def test_what_is_no_exception_is_contained(cases_named):
    def ends(framework: conformance.Framework) -> None:
        raise SystemExit("from a plug-in")

    cases_named(ends=ends, passes=passes)
    ended, passed = conformance.run("numpy")
    assert (ended.outcome, ended.reason) == ("failed", "SystemExit: from a plug-in")
    assert ended.place.startswith(__file__)
    assert passed == ("passes", "passed", "", "")


def test_an_interrupt_ends_with_what_is_known(capsys, cases_named):
    def interrupted(framework: conformance.Framework) -> None:
        raise KeyboardInterrupt

    cases_named(passes=passes, interrupted=interrupted, never_run=passes)
    assert main(["conformance", "numpy"]) == 130
    *_, row, summary = capsys.readouterr().out.splitlines()
    assert row.split() == ["interrupted", "interrupted"]
    assert summary == "numpy: 1 of 3 conformance cases passed; not run: 2"


def test_the_cases_of_one_backend():
    done = run("numpy", "-k", f"{A_CASE} or {ANOTHER}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("numpy: 2 of 2 conformance cases passed\n")
