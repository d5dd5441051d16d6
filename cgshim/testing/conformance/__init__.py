"""The cases that every backend must pass, cgshim's own and third-party ones alike.

A backend's test file is three lines::

    @pytest.mark.parametrize("case", conformance.cases("mlx", gaps={"dtypes[float64]": "why"}))
    def test_conformance(case):
        case()

A gap is strict: a case that is in the table and passes counts as a failure, so that the table stays
true.
"""

from cgshim.testing.conformance import (  # noqa: F401  # imported for the cases that they register
    _arguments,
    _batches,
    _calls,
    _captured,
    _complex,
    _conventions,
    _current_backend,
    _custom_jvp,
    _examples,
    _first_order,
    _foreign_functions,
    _helpers_of_rules,
    _hidden,
    _host,
    _host_rules,
    _kept_outputs,
    _linear,
    _needed,
    _once,
    _orders,
    _outputs,
    _residuals,
    _returns,
    _rules_with_ops,
    _runs,
    _variables,
    _vjp_variables,
)
from cgshim.testing.conformance._framework import (
    Framework as Framework,
    differentiate_traced as differentiate_traced,
)
from cgshim.testing.conformance._registry import (
    Case as Case,
    KnownGap as KnownGap,
    Result as Result,
    cases as cases,
    run as run,
)
