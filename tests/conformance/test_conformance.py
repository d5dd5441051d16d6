"""Every conformance case on every backend of the run; what the public functions around them
promise.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from gaps import GAPS, OF_VERSIONS

from cgshim.testing import conformance
from cgshim.testing.conformance import _registry


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        cases = [
            case for name in metafunc.config.option.backends for case in conformance.cases(name)
        ]
        metafunc.parametrize(
            "case", cases, ids=[f"{case.framework.name}-{case.name}" for case in cases]
        )


def test_conformance(case: conformance.Case) -> None:
    case()


def test_table_of_gaps_is_short_and_true() -> None:
    assert len(GAPS) <= 5
    for row, reason in [*GAPS.items(), *OF_VERSIONS.items()]:
        assert re.search(r"#\d+|https://", reason), (
            f"{', '.join(row)}: no upstream issue in {reason!r}"
        )


A_CASE = "product_asked_twice"


def _case(gaps: dict[str, str] | None = None) -> conformance.Case:
    return next(case for case in conformance.cases("numpy", gaps=gaps) if case.name == A_CASE)


def test_a_gap_that_is_closed_fails() -> None:
    with pytest.raises(
        AssertionError, match=f"{A_CASE} passes on numpy: take it off the table of gaps"
    ):
        _case({A_CASE: "some issue"})()


@pytest.fixture
def wrong_pullback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework whose vjp is twice what it should be."""
    framework = _case().framework
    right = framework.backend.vjp

    def wrong(*args):
        outputs, pullback = right(*args)
        return outputs, lambda upstreams: [2 * g for g in pullback(upstreams)]

    monkeypatch.setattr(framework.backend, "vjp", wrong)


@pytest.mark.usefixtures("wrong_pullback")
def test_a_wrong_backend_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="Not equal"):
        _case()()
    with pytest.raises(conformance.KnownGap, match=r"^some issue$"):
        _case({A_CASE: "some issue"})()
    few = {name: _registry._bodies[name] for name in (A_CASE, "same_tensor_twice", "f_raises")}
    monkeypatch.setattr(_registry, "_bodies", few)
    outcomes = {
        result.case: result for result in conformance.run("numpy", gaps={A_CASE: "some issue"})
    }
    assert outcomes[A_CASE] == (A_CASE, "gap", "some issue", "")
    wrong = outcomes["same_tensor_twice"]
    assert (wrong.outcome, wrong.reason.split()[0]) == ("failed", "AssertionError:")
    assert outcomes["f_raises"] == ("f_raises", "passed", "", "")


def test_a_gap_that_is_no_case_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^the table of gaps names cases that do not exist: no_such_case$"
    ):
        conformance.cases("numpy", gaps={"no_such_case": "some issue"})


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (np.array([1.0, 2.0]), np.array([1.0, 2.1])),
        (np.array([1.0, 1.0]), np.array(1.0)),
        (np.array([1.0, 2.0]), [np.array([1.0, 2.0])]),
        (np.array(1.0), None),
        (None, np.array(1.0)),
        ({"x": np.array(1.0)}, {"y": np.array(1.0)}),
    ],
    ids=["a number", "a shape", "a structure", "a tensor for None", "None for a tensor", "a key"],
)
def test_the_comparison_notices(found: object, expected: object) -> None:
    with pytest.raises(AssertionError):
        conformance.Framework("numpy").check_equal(found, expected)
