"""Each recipe is right: its op by differences, and in what it is there for."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cgshim import (
    op_clip,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_grad,
    op_sum,
    op_transpose,
    op_value_and_grad,
    op_vjp,
)
from cgshim.testing import check_gradients

EXAMPLES = Path(__file__).parents[2] / "examples"

X = np.array([-1.3, 0.4, 2.1, 0.7])
IMAGE = np.linspace(-1.0, 2.0, 30).reshape(5, 6) ** 3
MATRIX = np.array([[4.0, -1.0, 0.5], [0.3, 3.0, 1.0], [-0.7, 0.2, 5.0]])
PARAMETERS = (0.1 * MATRIX, X[:3])


def tensor(array, dtype="float64"):
    return op_convert_to_tensor(np.asarray(array), dtype)


# --- Every op against differences, or against the surrogate that it states ------------------------

OPS = {
    "straight_through.quantise": (
        [X],
        lambda op: lambda x: op(x, 2),
        lambda x: op_clip(x, -1.0, 1.0),
    ),
    "gradient_reversal.reverse_gradient": (
        [X],
        lambda op: lambda x: op(x, 0.3),
        lambda x: -0.3 * x,
    ),
    "clipped_gradient.clip_gradient": ([X], lambda op: lambda x: op(x, 1e3), None),
    "stable_functions.log1pexp": ([X], None, None),
    "stable_functions.logsumexp": ([X], None, None),
    "stable_functions.safe_norm": ([X], None, None),
    "stable_functions.log_sinh": ([X**2], None, None),
    "given_forward.logsumexp": ([X], None, None),
    "batched_kernel.apply": ([MATRIX, X[:3]], None, None),
    "implicit_differentiation.solve": ([MATRIX, X[:3]], None, None),
    "scipy_adjoint.blur": ([IMAGE], None, None),
    "scipy_adjoint.adjoint_of_blur": ([IMAGE], None, None),
}


@pytest.mark.parametrize("name", OPS)
def test_gradients(name):
    arrays, wrap, surrogate = OPS[name]
    module, _, attribute = name.partition(".")
    op = getattr(importlib.import_module(module), attribute)
    modes = ("reverse", "forward") if op.forward_mode else ("reverse",)
    args = [tensor(array) for array in arrays]
    check_gradients(wrap(op) if wrap else op, args, modes=modes, against=surrogate)


def test_gradients_of_the_fixed_point():
    from implicit_differentiation import fixed_point, layer

    start = tensor(X[:3])
    parameters = tuple(tensor(array) for array in PARAMETERS)
    check_gradients(lambda p: fixed_point(layer, p, start), [parameters], modes=("reverse",))


def test_gradients_of_what_is_recomputed():
    from recompute import block, recompute

    again = recompute(block)
    check_gradients(
        lambda x, scale: again(x, scale, seed=3), [tensor(X), tensor(1.1)], modes=("reverse",)
    )


# --- What each is there for -----------------------------------------------------------------------


def test_the_clipped_gradient_keeps_its_direction():
    from clipped_gradient import clip_gradient

    upstream = np.array([3.0, -4.0])
    for norm, expected in [(1.0, upstream / 5), (10.0, upstream)]:
        _, pullback = op_vjp(lambda x, norm=norm: clip_gradient(x, norm), tensor([1.0, 2.0]))
        np.testing.assert_allclose(
            op_convert_to_numpy(pullback(tensor(upstream))[0]), expected, rtol=1e-9
        )


STABLE = {
    "log1pexp": lambda x: (
        np.logaddexp(0, x),
        1 / (1 + np.exp(-x)),
        np.exp(-abs(x)) / (1 + np.exp(-abs(x))) ** 2,
    ),
    "log_sinh": lambda x: (x + np.log(-np.expm1(-2 * x) / 2), 1 / np.tanh(x), -1 / np.sinh(x) ** 2),
}


@pytest.mark.parametrize(("name", "at"), [*(("log1pexp", x) for x in (-80.0, -5.0, 0.0, 3.0, 100.0)),
                                          *(("log_sinh", x) for x in (1e-3, 2.0, 100.0))])  # fmt: skip
def test_a_stable_function_is_right_in_float32_at_two_orders(name, at):
    import stable_functions

    op, x = getattr(stable_functions, name), tensor(at, "float32")
    found = [op_convert_to_numpy(fn(x)) for fn in (op, op_grad(op), op_grad(op_grad(op)))]
    np.testing.assert_allclose(found, STABLE[name](at), rtol=2e-5, atol=1e-30)


def test_the_adjoint_of_scipys_routine():
    from scipy_adjoint import adjoint_of_blur, blur

    product = lambda a, b: np.sum(op_convert_to_numpy(a) * op_convert_to_numpy(b))
    other = tensor(np.cos(IMAGE))
    np.testing.assert_allclose(
        product(blur(tensor(IMAGE)), other), product(tensor(IMAGE), adjoint_of_blur(other))
    )


COMPILERS = {
    "jax": lambda jax, fn: jax.jit(op_value_and_grad(fn)),
    "tensorflow": lambda tensorflow, fn: tensorflow.function(op_value_and_grad(fn)),
    "torch": lambda torch, fn: op_value_and_grad(
        torch.compile(fn, backend="aot_eager", fullgraph=True)
    ),
    "numpy": lambda _, fn: op_value_and_grad(fn),
}


def value_and_gradient_in_compiled_code(backend, fn, *args):
    """Value and gradient by a function that the framework has compiled, and has run once; NumPy
    compiles none.
    """
    compiled = COMPILERS[backend](importlib.import_module(backend), fn)
    run = lambda: [op_convert_to_numpy(found) for found in compiled(*args)]  # which waits for JAX
    run()
    return run


def check_compiled(found, fn, *args):
    value, gradient = map(op_convert_to_numpy, op_value_and_grad(fn)(*args))
    np.testing.assert_allclose(found[0], value, rtol=1e-4)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-5)


IN_DYNAMO = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*", "ignore:.*should not be instantiated"
)


@IN_DYNAMO
def test_scipys_routine_in_compiled_code(backend):
    from scipy_adjoint import misfit

    given = tensor(IMAGE, "float32"), tensor(IMAGE[::-1].copy(), "float32")
    check_compiled(value_and_gradient_in_compiled_code(backend, misfit, *given)(), misfit, *given)


@IN_DYNAMO
def test_a_sparse_matrix_is_factored_once(backend):
    import sparse_solve

    size = sparse_solve.SIDE**2
    given = [
        tensor(start + np.linspace(0.0, 1.0, size) ** power)
        for start, power in ((1.0, 1), (0.0, 2), (0.5, 3))
    ]
    compiled = value_and_gradient_in_compiled_code(backend, sparse_solve.misfit, *given)
    sparse_solve.factorizations.clear()
    found = compiled()
    assert len(sparse_solve.factorizations) == 1
    check_compiled(found, sparse_solve.misfit, *given)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_recomputing_takes_less_memory(backend):
    """glibc's malloc may keep more than is in use, unless it asks the system for each array."""
    command = [sys.executable, str(EXAMPLES / "recompute.py"), "--memory", str(2**21)]
    environment = {**os.environ, "CGSHIM_BACKEND": backend, "MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    recomputed, plain = map(int, re.findall(r"(\d+) MB,", printed))
    assert recomputed < 0.8 * plain


def test_a_gradient_penalty_through_the_linear_solve():
    from implicit_differentiation import solve

    penalty = lambda solver: (
        lambda right: op_sum(op_grad(lambda b: op_sum(solver(tensor(MATRIX), b) ** 2))(right) ** 2)
    )
    inverse = np.linalg.inv(MATRIX)
    quadratic = inverse.T @ inverse  # the gradient of |x|^2 with respect to b is 2 Q b
    found = op_convert_to_numpy(op_grad(penalty(solve))(tensor(X[:3])))
    np.testing.assert_allclose(found, 8 * quadratic @ quadratic @ X[:3], rtol=1e-6)


def test_a_batch_is_one_launch_of_the_kernel(backend):
    import batched_kernel

    given = [tensor(MATRIX), tensor(np.stack([X[:3], X[1:]])), tensor(np.ones((2, 3)))]
    batched_kernel.launches.clear()
    gradient = op_convert_to_numpy(op_grad(batched_kernel.misfit)(*given))
    # NumPy has no vmap; JAX and TensorFlow trace one element, too, and run the batch only
    assert len(batched_kernel.launches) == (1 if backend == "torch" else 2)
    by_ops = op_grad(lambda m: op_sum((given[1] @ op_transpose(m) - given[2]) ** 2))(given[0])
    np.testing.assert_allclose(gradient, op_convert_to_numpy(by_ops))
