"""cgshim's own cases, and the table of what tinygrad cannot: every row of these."""

import pytest

from cgshim.testing import conformance

NO_COMPLEX = "tinygrad has no complex numbers: https://docs.tinygrad.org/dtypes/"
NO_FORWARD_MODE = "tinygrad has no forward mode, only Tensor.gradient and Tensor.backward: https://docs.tinygrad.org/tensor/"
NOT_TAKEN_APART = (
    "an op refuses when its outputs are differentiated; what f left in an object is none of them"
)
NO_TAKE = "this backend offers no take among NumPy's functions"
NO_TRUTH = "tinygrad asks no tensor whether it is true: `if x > 0` is its TypeError"

COMPLEX = {
    *(
        "complex_numbers",
        "complex_second_order",
        "complex_foreign_function",
        "complex_kept_output",
        "complex_product_of_two",
        "complex_vjp_in_a_rule",
        "complex_to_real",
    ),
    *("real_to_complex", "complex_and_real_arguments", "complex_forward_mode", "complex_variable"),
    "return_a_python_complex",
}
COMPLEX_ROWS = {
    *("dtypes[complex64]", "dtypes[complex128]", "host_dtypes[complex64]"),
    *(
        "numpy_array_of_another_byte_order[complex64]",
        "return_another_float[float32 for complex64]",
    ),
}
NO_TRANSPOSE = "this backend has no `transposed`, and no forward mode"
FORWARD_MODE = {
    *(
        "embedded_gradient_in_forward_mode",
        "host_function_in_forward_mode",
        "host_result_has_no_tangent",
        "rule_computes_once",
    ),
    *(
        "host_function_in_forward_mode_over_a_gradient",
        "kept_output_forward_over_reverse",
        "needed_in_forward_mode",
    ),
    *(
        "linear_rule",
        "linear_rule_of_two_arguments_and_outputs",
        "linear_rule_that_keeps_its_output",
    ),
    *("nonlinear_rule", "nonlinear_rule_of_two_outputs"),
    *("once_forward_over_reverse", "once_in_forward_mode", "once_tangent_has_no_derivative"),
}


def _gaps():
    for case in conformance.cases("tinygrad"):
        body = case.name.partition("[")[0]
        has_jvp_fn = (
            "jvp" in body
            or body.startswith("both_rules")
            or case.name.endswith("for forward mode]")
        )
        if body in COMPLEX or case.name in COMPLEX_ROWS:
            yield case.name, NO_COMPLEX
        elif has_jvp_fn and body != "no_jvp":
            yield case.name, NO_TRANSPOSE
        elif body in FORWARD_MODE:
            yield case.name, NO_FORWARD_MODE
        elif body == "tensor_in_an_object" and "an object" in case.name:
            yield case.name, NOT_TAKEN_APART
        elif body == "inner_op_that_returns_integers":
            yield case.name, NO_TAKE
        elif case.name.endswith("one that branches]"):
            yield case.name, NO_TRUTH


@pytest.mark.parametrize("case", conformance.cases("tinygrad", gaps=dict(_gaps())))
def test_conformance(case):
    case()
