"""What a framework cannot give: a row is a strict xfail, so that it goes when its reason does. At
most five rows.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

GAPS: dict[tuple[str, str], str] = {
    ("tensorflow", "test_a_rule_that_may_not_be_linear_is_refused_in_a_function"): (
        "a ForwardAccumulator around a tf.function transposes the rules in it without a call of Python: a linear rule "
        "has the right tangent, any other a wrong one, as with tf.custom_gradient; "
        "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/forwardprop.py"
    ),
}
"""(backend, test or conformance case): the reason, with the framework's own issue"""


_CHECKIFY = (
    "around checkify, a derivative finds no errors in a jax.custom_vjp by hand either, and fails within jit; "
    "https://docs.jax.dev/en/latest/debugging/checkify_guide.html"
)
_MESHES = (
    "the program asks for jax.shard_map, jax.set_mesh and types with shardings, which came one after the other, and "
    "shard_map of 0.8 fails with a TypeError of its own (_psum_invariant_abstract_eval): "
    "https://docs.jax.dev/en/latest/changelog.html"
)
_RECORDED = (
    "types tell over which devices values vary since JAX 0.6; before, a call within jit is not one operation: "
    "https://docs.jax.dev/en/latest/changelog.html"
)

_PULLBACKS = (
    "below the derivatives of a vmap, JAX to 0.6 runs a program of jax.vjp within f with an array of another shape: "
    "https://docs.jax.dev/en/latest/changelog.html"
)
_PALLAS = (
    "Pallas has no lowering of lax.stop_gradient for TPU before JAX 0.9: "
    "https://docs.jax.dev/en/latest/pallas/CHANGELOG.html"
)

_GRAPH_ENDS = (
    "where a graph ends within torch.func, torch.compile with backend='eager' fails on torch's own frames: "
    "https://github.com/pytorch/pytorch/blob/v2.12.0/torch/_subclasses/meta_utils.py"
)
_SPARSE = (
    "aten::amax, of the check that a rule is linear, takes no sparse tensor: "
    "https://github.com/pytorch/pytorch/blob/v2.8.0/aten/src/ATen/native/native_functions.yaml"
)

_UFUNC = (
    "autograd's boxes have __array_ufunc__ from 1.9 on: before, NumPy's own functions (np.sin) do not take them, nor "
    "by hand: https://github.com/HIPS/autograd/releases"
)
_NUMBERS = (
    "before autograd 1.9 a box of a Python number has no dtype, so what f makes of it is no residual: "
    "https://github.com/HIPS/autograd/releases"
)
_WITH_NUMBERS = [
    "test_orders_of_x_times_square[2-42.0]",
    "test_orders_of_x_times_square[3-21.0]",
    "test_a_captured_python_float[2-11.0]",
    "test_a_captured_box_that_the_rule_reads_itself[forward over reverse]",
    "test_a_captured_box_that_the_rule_reads_itself[forward over forward]",
    "test_a_captured_box_that_the_rule_reads_itself[reverse over forward]",
    "test_forward_over_reverse_of_the_nested_recipe[fused-expected0]",
    "test_forward_over_reverse_of_the_nested_recipe_in_a_rule",
    "test_a_box_of_known_gradients",
    "test_a_box_of_op_grad",
    "test_forward_mode[an intermediate-forward over reverse]",
    "test_forward_mode[an intermediate-reverse over forward]",
    "test_forward_mode[an intermediate-forward over forward]",
]
_OBJECTS = (
    "before autograd 1.9 np.array(box) is an array of objects, of which autograd records a part, by hand too: "
    "https://github.com/HIPS/autograd/releases"
)

OF_VERSIONS: dict[tuple[str, str, str], str] = {
    ("numpy", "<1.9", "test_numpys_own_functions_in_a_rule"): _UFUNC,
    **dict.fromkeys([("numpy", "<1.9", name) for name in _WITH_NUMBERS], _NUMBERS),
    ("numpy", "<1.9", "test_a_residual_made_of_numbers_has_a_first_order_only[in place]"): _OBJECTS,
    ("jax", "<0.9", "test_on_simulated_devices"): _MESHES,
    ("jax", "<0.8", "test_on_eight_simulated_devices"): _MESHES,
    ("jax", "<0.7", "test_on_four_devices"): _MESHES,
    ("jax", "<0.6", "test_errors_are_those_of_a_custom_vjp[vmap of jit-check]"): _CHECKIFY,
    (
        "jax",
        "<0.6",
        "test_errors_are_those_of_a_custom_vjp[vmap of jit-check that passes]",
    ): _CHECKIFY,
    ("jax", "<0.7", "test_a_residual_wherever_it_is[of_inner_vjp-of vmap-3]"): _PULLBACKS,
    ("jax", "<0.7", "test_a_residual_wherever_it_is[of_inner_linearization-of vmap-3]"): _PULLBACKS,
    ("jax", "<0.7", "test_a_residual_wherever_it_is[of_inner_transpose-of vmap-3]"): _PULLBACKS,
    ("jax", "<0.6", "test_an_op_in_a_kernel[loop]"): _PALLAS,
    ("jax", "<0.9", "test_an_op_in_a_kernel[gradient]"): _PALLAS,
    ("jax", "<0.6", "test_the_residuals_are_those_of_a_custom_vjp[jit]"): _RECORDED,
    ("jax", "<0.6", "test_the_residuals_are_those_of_a_custom_vjp[<lambda>]"): _RECORDED,
    ("torch", ">=2.13", "test_a_second_order_is_never_dropped[eager]"): (
        "torch.compile loses second orders silently: with backend='eager' the backward of any Function has no graph; "
        "https://github.com/pytorch/pytorch/issues/91469"
    ),
    ("torch", ">=2.13", "test_a_second_order_is_never_dropped[aot_eager]"): (
        "torch.compile loses the second order of a graph whose backward reads none of its inputs, as that of an op, "
        "whose rule keeps them without their graph, or what f made of them; inductor refuses it; fixed after 2.13: "
        "https://github.com/pytorch/pytorch/issues/181581"
    ),
    ("torch", ">=2.13", "test_a_kept_argument_is_changed_in_place_later"): (
        "torch.compile reads what a Function has saved as it is in the backward pass, without torch's check that "
        "it has not changed, by hand too: "
        "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/variables/higher_order_ops.py"
    ),
    ("torch", ">=2.8,<2.11", "test_vmap_of_grad_of_an_op[eager]"): _GRAPH_ENDS,
    ("torch", "<2.10", "test_forward_mode_of_a_sparse_gradient"): _SPARSE,
}
"""(backend, its framework's or autograd's versions as pip writes them, test or conformance case): the reason"""


def gaps_of(backend: str) -> dict[str, str]:
    """Return the gaps of a backend with the version of its framework that is installed."""
    always = {test: reason for (name, test), reason in GAPS.items() if name == backend}
    rows = [
        (test, reason, versions)
        for (name, versions, test), reason in OF_VERSIONS.items()
        if name == backend
    ]
    installed = (
        version("autograd")
        if backend == "numpy"
        else import_module(backend).__version__
        if rows
        else ""
    )
    return always | {
        test: reason
        for test, reason, versions in rows
        if SpecifierSet(versions).contains(installed)
    }
