"""What networks are made of, at numbers where the formula as it stands overflows; the dtype of what
is made without one; and where to find what has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim import BackendError, ops
from cgshim.testing.conformance import Framework

Function = Callable[..., Any]

FAR = np.array([-1000.0, -30.0, 0.0, 30.0, 1000.0])
WEIGHTS = np.array([7.0, -3.0, 11.0, 5.0, 2.0])
SLOPES: dict[str, tuple[Function, Any]] = {
    "softplus": (lambda x: ops.softplus(x), 1 / (1 + np.exp(-FAR.clip(-700)))),
    "relu": (lambda x: ops.relu(x), np.array([0.0, 0.0, 0.0, 1.0, 1.0])),
    "sigmoid": (lambda x: ops.sigmoid(x), np.exp(-abs(FAR)) / (1 + np.exp(-abs(FAR))) ** 2),
    "special.log_expit": (lambda x: ops.special.log_expit(x), 1 / (1 + np.exp(FAR.clip(max=700)))),
    "special.ndtr": (lambda x: ops.special.ndtr(x), np.exp(-(FAR**2) / 2) / np.sqrt(2 * np.pi)),
}


@pytest.mark.parametrize("name", SLOPES)
def test_a_derivative_far_from_zero(backend: str, name: str) -> None:
    function, slope = SLOPES[name]
    framework = Framework(backend)
    x, weights = framework.tensor(FAR), framework.tensor(WEIGHTS)
    found = cgshim.op_grad(lambda x: ops.sum(weights * function(x)))(x)
    np.testing.assert_allclose(ops.convert_to_numpy(found), WEIGHTS * slope, rtol=1e-4, atol=1e-6)


def test_sums_of_exponentials_far_from_zero(backend: str) -> None:
    framework = Framework(backend)
    x, weights = framework.tensor(FAR), framework.tensor(WEIGHTS)
    one_hot = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    framework.check_equal(ops.softmax(x), one_hot)
    framework.check_equal(ops.logsumexp(x), np.array(1000.0))
    framework.check_equal(ops.log_softmax(x), FAR - 1000.0)
    framework.check_equal(cgshim.op_grad(ops.logsumexp)(x), one_hot)
    of_log = cgshim.op_grad(lambda x: ops.sum(weights * ops.log_softmax(x)))(x)
    framework.check_equal(of_log, WEIGHTS - WEIGHTS.sum() * one_hot)


def test_they_run_in_a_rule(backend: str) -> None:
    """The rule is 7 times the sigmoid, which autodiff cannot give; its derivative is autodiff's."""
    framework = Framework(backend)

    @cgshim.op_custom_gradient
    def seven_softplus(x: Any) -> Any:
        return ops.softplus(x), lambda upstream: 7.0 * upstream * ops.sigmoid(x)

    x = framework.tensor([-1.0, 0.5])
    framework.check(
        seven_softplus, x, upstream=framework.tensor([2.0, -3.0]),
        output=np.log1p(np.exp([-1.0, 0.5])),
        gradients=(7.0 * np.array([2.0, -3.0]) / (1 + np.exp([1.0, -0.5])),),
    )  # fmt: skip


def test_the_largest_have_the_gradient(backend: str) -> None:
    """Of equal numbers the first one."""
    framework = Framework(backend)
    x, weights = framework.tensor([3.0, 5.0, 1.0, 5.0]), framework.tensor([7.0, 11.0, 13.0])
    values, indices = ops.top_k(x, 3)
    framework.check_equal(values, np.array([5.0, 5.0, 3.0]))
    framework.check_equal(indices, np.array([1, 3, 0]))
    found = cgshim.op_grad(lambda x: ops.sum(weights * ops.top_k(x, 3)[0]))(x)
    framework.check_equal(found, np.array([13.0, 7.0, 0.0, 11.0]))


def test_only_a_triangle_has_a_gradient(backend: str) -> None:
    framework = Framework(backend)
    a, b = framework.tensor([[2.0, 9.0], [3.0, 4.0]]), framework.tensor([4.0, 26.0])
    weights = framework.tensor([7.0, 12.0])
    solve = lambda a, b: ops.linalg.solve_triangular(a, b, lower=True)
    framework.check_equal(solve(a, b), np.array([2.0, 5.0]))
    pulled = cgshim.op_vjp(solve, a, b)[1](weights)
    framework.check_equal(pulled[1], np.array([-1.0, 3.0]))
    framework.check_equal(pulled[0], np.array([[2.0, 0.0], [-6.0, -15.0]]))


# --- The dtype of what is made without one --------------------------------------------------------

MADE: dict[str, tuple[Function, Any]] = {
    "ones": (lambda **dtype: ops.ones(2, **dtype), [1, 1]),
    "zeros": (lambda **dtype: ops.zeros((2,), **dtype), [0, 0]),
    "full": (lambda **dtype: ops.full(2, 0.5, **dtype), [0.5, 0.5]),
    "eye": (lambda **dtype: ops.eye(2, **dtype)[0], [1, 0]),
    "arange": (lambda **dtype: ops.arange(0.5, 2.0, **dtype), [0.5, 1.5]),
    "linspace": (lambda **dtype: ops.linspace(0, 1, 2, **dtype), [0, 1]),
    "asarray": (lambda **dtype: ops.asarray([0.5, 2], **dtype), [0.5, 2]),
    "array": (lambda **dtype: ops.array([0.5, 2], **dtype), [0.5, 2]),
}


@pytest.mark.parametrize("name", MADE)
def test_floats_have_the_frameworks_default(backend: str, name: str) -> None:
    make, values = MADE[name]
    framework = Framework(backend)
    with cgshim.use_backend(backend):
        made = {dtype: make(**({"dtype": dtype} if dtype else {})) for dtype in ("", "float16")}
    # JAX's is float64 in these tests, which enable it
    assert ops.dtype(made[""]) == ("float64" if backend in ("numpy", "jax") else "float32")
    assert ops.dtype(made["float16"]) == "float16"
    for found in made.values():
        framework.check_equal(found, np.array(values))


def test_integers_and_arrays_keep_their_dtypes(backend: str) -> None:
    with cgshim.use_backend(backend):
        wide = ops.convert_to_tensor(np.array([0.5]), "float64" if backend != "jax" else "float32")
        found = [ops.arange(3), ops.full(2, 7), ops.asarray([1, 2]), ops.asarray(wide)]
    assert all(ops.dtype(x) in ("int64", "int32") for x in found[:3])
    assert ops.dtype(found[3]) == ops.dtype(wide)


def test_a_rule_of_single_precision_may_make_floats(backend: str) -> None:
    framework = Framework(backend)

    @cgshim.op_custom_gradient
    def op(x: Any) -> Any:
        return x * ops.ones(2), lambda upstream: upstream * ops.full(2, 7.0) * ops.linspace(1, 3, 2)

    framework.check(
        op, framework.tensor([2.0, 5.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([2.0, 5.0]), gradients=(np.array([14.0, -63.0]),),
    )  # fmt: skip


# --- Where to find it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "place"),
    [("erf", "ops.special.erf"), ("solve_triangular", "ops.linalg.solve_triangular"),
     ("det", "ops.linalg.det"), ("rfft", "ops.fft.rfft"), ("entr", "ops.special.entr")],
)  # fmt: skip
def test_what_stands_elsewhere_is_told(name: str, place: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(ops, name)
    assert str(error.value) == (
        f"numpy has no function {name} of arrays, and so cgshim.ops has none; call {place}"
    )


def test_scipy_functions_without_a_derivative_raise() -> None:
    assert ops.special.erfcx(np.array([0.0, 1.0])) == pytest.approx([1.0, 0.427583576])
    with pytest.raises(
        BackendError,
        match=r"^op_special.erfcx: what is differentiated on NumPy must have a derivative in autograd, "
        r"got scipy.special.erfcx; call it in an f of op_custom_gradient, and write its rule$",
    ):
        cgshim.op_grad(lambda x: ops.special.erfcx(x))(np.array(1.0))
