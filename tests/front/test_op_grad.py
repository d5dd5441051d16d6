"""op_grad, op_value_and_grad and op_vjp: what they differentiate, and what they refuse."""

from typing import Any

import numpy as np
import pytest

import cgshim
from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
    op_grad,
    op_jvp,
    op_value_and_grad,
    op_vjp,
    ops,
)
from cgshim.testing import check_gradients
from cgshim.testing.conformance import Framework


@pytest.fixture
def framework(backend):
    return Framework(backend)


def weighted(x, y, *, scale=1.0):
    """A scalar whose gradients are y and x, times 3 and the scale."""
    return 3.0 * scale * ops.sum(x * y)


# --- Which arguments ------------------------------------------------------------------------------

ARGNUMS: dict[Any, Any] = {
    0: np.array([15.0, 21.0]),
    1: np.array([3.0, -6.0]),
    -1: np.array([3.0, -6.0]),
    -2: np.array([15.0, 21.0]),
    (0,): (np.array([15.0, 21.0]),),
    (1, 0): (np.array([3.0, -6.0]), np.array([15.0, 21.0])),
    (0, -1): (np.array([15.0, 21.0]), np.array([3.0, -6.0])),
}


@pytest.mark.parametrize(("argnums", "expected"), ARGNUMS.items(), ids=map(str, ARGNUMS))
def test_argnums(framework, argnums, expected):
    x, y = framework.tensor([1.0, -2.0]), framework.tensor([5.0, 7.0])
    framework.check_equal(op_grad(weighted, argnums)(x, y), expected)
    value, gradient = op_value_and_grad(weighted, argnums=argnums)(x, y)
    framework.check_equal(value, np.array(-27.0))
    framework.check_equal(gradient, expected)


def test_keywords_reach_the_function(framework):
    x, y = framework.tensor([1.0, -2.0]), framework.tensor([5.0, 7.0])
    framework.check_equal(op_grad(weighted)(x, y, scale=2.0), np.array([30.0, 42.0]))


def test_a_tree_of_floats_and_what_is_static(framework):
    """None stands where there is nothing to differentiate."""

    def fn(tree):
        assert tree["mode"] == "static"
        return ops.sum(tree["a"] * tree["b"][0])

    tree = {"a": framework.tensor([1.0, 2.0]), "b": [framework.tensor(3.0), None], "mode": "static"}
    framework.check_equal(
        op_grad(fn)(tree), {"a": np.array([3.0, 3.0]), "b": [np.array(3.0), None], "mode": None}
    )


# --- Python numbers -------------------------------------------------------------------------------


def test_at_a_python_float(backend, framework):
    with cgshim.use_backend(backend):
        framework.check_equal(op_grad(lambda x: x * x * x)(2.0), np.array(12.0))
        value, gradient = op_value_and_grad(lambda p: p["x"] * p["n"])({"x": 2.0, "n": 3})
        framework.check_equal((value, gradient), (np.array(6.0), {"x": np.array(3.0), "n": None}))


def test_at_a_python_complex(backend, framework):
    """As at the tensor that the number becomes: the gradient is in the framework's own convention."""
    fn = lambda z: ops.real(z * z * z)
    with cgshim.use_backend(backend):
        found = op_grad(fn)(1.0 + 2.0j)
        expected = op_grad(fn)(cgshim.op_convert_to_tensor(1.0 + 2.0j))
        framework.check_equal(found, framework.numpy(expected))
    # 3 z^2 or its conjugate
    assert abs(complex(framework.numpy(found)) - (-9.0)) == pytest.approx(12.0)


# --- What is refused ------------------------------------------------------------------------------


def named(fn):
    fn.__name__ = "fn"
    return fn


SCALAR = (
    "op_grad(fn): the function must return one real scalar, got {}; use op_vjp for other outputs"
)
FLOATS = (
    "op_grad(fn): argument {} must hold only float or complex tensors, got {}; "
    "convert it, or leave it out of argnums"
)

REFUSED = {
    "a complex output": (lambda z, n: z * z, "z", SCALAR.format("c64[]")),
    "a complex output of a real number": (lambda x, n: ops.sum(ops.multiply(x, 1j)), "x", None),
    "a vector": (lambda x, n: x * 2.0, "x", SCALAR.format("f32[2]")),
    "one element": (lambda x, n: x[:1], "x", SCALAR.format("f32[1]")),
    "an integer": (lambda x, n: n[0], "x", SCALAR.format("i32[]")),
    "a Python float": (lambda x, n: 3.0, "x", SCALAR.format("float")),
    "None": (lambda x, n: None, "x", SCALAR.format("None")),
    "a tuple": (lambda x, n: (x[0],), "x", SCALAR.format("(f32[],)")),
}


@pytest.mark.parametrize(("fn", "of", "text"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("grad", [op_grad, op_value_and_grad])
def test_an_output_that_is_no_real_scalar_is_refused(framework, fn, of, text, grad):
    x = {"x": framework.tensor([1.0, 2.0]), "z": framework.tensor(1.0 + 2.0j, "complex64")}[of]
    with pytest.raises(CustomGradientTypeError) as error:
        grad(named(fn))(x, framework.tensor([3, 4], "int32"))
    message = str(error.value).replace(grad.__name__, "op_grad", 1)
    assert text is None or message == text
    assert message.startswith("op_grad(fn): the function must return one real scalar, got ")


@pytest.mark.parametrize(
    ("argnums", "at", "what"),
    [
        (0, 0, "{'x': f32[], 'n': i32[]}"),
        (1, 1, "i32[]"),
        (2, 2, "str"),
        ((3, 1), 1, "i32[]"),
        (4, 4, "int"),
        (-1, 5, "(int, None)"),
    ],
)
def test_an_argument_without_floats_is_refused(backend, framework, argnums, at, what):
    """And one that holds an integer tensor beside a float one, whose gradient would be None."""
    x, n = framework.tensor(2.0), framework.tensor(3, "int32")
    args = ({"x": x, "n": n}, n, "text", x, 3, (3, None))
    with cgshim.use_backend(backend), pytest.raises(CustomGradientTypeError) as error:
        op_grad(named(lambda *args: args[3]), argnums)(*args)
    assert str(error.value) == FLOATS.format(at, what)


NOT_THERE = (
    "op_grad(fn): argnums must number different positional arguments, got {}; "
    "pass them by position, and name each once"
)


@pytest.mark.parametrize(
    ("argnums", "args", "got"),
    [
        (0, (), "0 for 0 positional arguments"),
        (1, (1.0,), "1 for 1 positional argument"),
        (-3, (1.0, 2.0), "-3 for 2 positional arguments"),
        ((0, 0), (1.0, 2.0), "(0, 0) for 2 positional arguments"),
        ((1, -1), (1.0, 2.0), "(1, -1) for 2 positional arguments"),
        ((), (1.0,), "() for 1 positional argument"),
        (None, (1.0,), "None for 1 positional argument"),
        ("x", (1.0,), "'x' for 1 positional argument"),
    ],
)
def test_argnums_that_number_no_arguments(argnums, args, got):
    with pytest.raises(CustomGradientTypeError) as error:
        op_grad(named(lambda *args, **options: args[0]), argnums)(*args, x=3.0)
    assert str(error.value) == NOT_THERE.format(got)


def test_numpys_integers_number_arguments(framework):
    gradient = op_grad(lambda x, y: x * y, np.int64(1))(
        framework.tensor(2.0), framework.tensor(3.0)
    )
    framework.check_equal(gradient, np.array(2.0))


@pytest.mark.parametrize(
    ("call", "op", "got"),
    [
        (op_grad, "op_grad", "int"),
        (cgshim.op_vjp, "op_vjp", "int"),
        (check_gradients, "check_gradients", "int"),
    ],
)
def test_what_is_no_function(call, op, got):
    with pytest.raises(CustomGradientTypeError) as error:
        call(5, [np.ones(2)])
    assert (
        str(error.value)
        == f"{op}: the function must be callable, got {got}; pass the function first"
    )


# --- op_vjp ---------------------------------------------------------------------------------------


def test_pullback_of_what_has_no_gradient(framework):
    """None for an argument without a float, and zeros for an upstream gradient of None."""
    x, n = framework.tensor([1.0, 2.0]), framework.tensor(3, "int32")
    output, pullback = op_vjp(
        lambda x, n, mode: {"y": x * x, "z": x * 5.0, "n": n, "mode": mode}, x, n, "static"
    )
    framework.check_equal(
        output, {"y": np.array([1.0, 4.0]), "z": np.array([5.0, 10.0]), "n": 3, "mode": "static"}
    )
    upstream = {"y": framework.tensor([2.0, -3.0]), "z": None, "n": None, "mode": None}
    framework.check_equal(pullback(upstream), (np.array([4.0, -12.0]), None, None))
    framework.check_equal(
        pullback({**upstream, "z": framework.tensor([1.0, 1.0])})[0], np.array([9.0, -7.0])
    )


def test_an_upstream_of_another_float_is_cast(framework):
    _, pullback = op_vjp(lambda x: x * x, framework.tensor([1.0, 2.0]))
    (found,) = pullback(framework.tensor([2.0, -3.0], "float64"))
    framework.check_equal(found, np.array([4.0, -12.0]))
    assert found.dtype == framework.tensor(1.0).dtype


def test_an_upstream_may_be_a_number(framework):
    _, pullback = op_vjp(lambda x: x * x, framework.tensor(2.0))
    framework.check_equal([pullback(3.0), pullback(3)], [(np.array(12.0),)] * 2)


def test_a_tangent(framework):
    tensor = framework.tensor
    primals = (tensor([2.0, 3.0]), {"y": tensor([5.0, 7.0]), "name": "static"})
    tangents = (tensor([1.0, 10.0]), {"y": tensor([-1.0, 2.0]), "name": None})
    fn = lambda x, tree: {"product": 3.0 * x * tree["y"], "constant": [tensor(1.0)]}
    output, tangent = op_jvp(fn, primals, tangents)
    expected = {"product": np.array([30.0, 63.0]), "constant": [np.array(1.0)]}
    framework.check_equal(output, expected)
    expected = {"product": np.array([9.0, 228.0]), "constant": [np.array(0.0)]}
    framework.check_equal(tangent, expected)
    _, tangent = op_jvp(fn, primals, (tangents[0], None))
    framework.check_equal(tangent["product"], np.array([15.0, 210.0]))


def test_a_tangent_is_that_of_the_rule(framework):
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x), forward_mode=True)
    x, dx = framework.tensor([2.0, 3.0]), framework.tensor([1.0, 10.0])
    _, tangent = op_jvp(lambda x: 2.0 * op(x), (x,), (dx,))
    framework.check_equal(tangent, np.array([28.0, 420.0]))
    _, second = op_jvp(lambda x: op_jvp(op, (x,), (dx,))[1], (x,), (dx,))
    framework.check_equal(second, np.array([7.0, 700.0]))
    unpromised = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x), name="square")
    with pytest.raises(TransformationError, match=r"square: .*forward_mode=True"):
        op_jvp(unpromised, (x,), (dx,))


def test_tangents_that_do_not_fit(framework):
    x = framework.tensor([2.0, 3.0])
    for tangents, message in [
        ((), "each argument must have a tangent, got 0 tangents for 1 argument"),
        (((x, x),), "the tangents must be structured as argument 0"),
        ((framework.tensor(1.0),), r"the tangent of argument 0 must have its shape f32\[2\]"),
    ]:
        with pytest.raises(CustomGradientError, match=rf"^op_jvp\(square\): {message}"):
            op_jvp(square, (x,), tangents)


def square(x):
    return x * x


def _product_with_aux(x, y):
    product = x * y
    return ops.sum(product * product), {"product": product, "name": "aux", "twice": [2.0 * y]}


def test_aux_comes_back_with_the_gradient(framework):
    x, y = framework.tensor([2.0, 3.0]), framework.tensor([5.0, 7.0])
    (value, aux), gradient = op_value_and_grad(_product_with_aux, argnums=1, has_aux=True)(x, y)
    assert aux["name"] == "aux"
    framework.check_equal(
        [value, aux["product"], aux["twice"]],
        [np.array(541.0), np.array([10, 21]), [np.array([10, 14])]],
    )
    framework.check_equal(gradient, np.array([40.0, 126.0]))
    gradients, aux = op_grad(_product_with_aux, argnums=(0, 1), has_aux=True)(x, y)
    expected = [np.array(x) for x in ([100, 294], [40, 126], [10, 21])]
    framework.check_equal([*gradients, aux["product"]], expected)


def test_a_gradient_of_a_gradient_with_aux(framework):
    x, y = framework.tensor([2.0, 3.0]), framework.tensor([5.0, 7.0])
    first = op_grad(_product_with_aux, has_aux=True)
    second = op_grad(lambda x: ops.sum(first(x, y)[0]))
    framework.check_equal(second(x), np.array([50.0, 98.0]))


def test_a_function_without_aux(framework):
    with pytest.raises(CustomGradientTypeError, match=r"must return a pair \(output, aux\)"):
        op_grad(lambda x: ops.sum(x), has_aux=True)(framework.tensor([2.0]))


def test_a_value_and_the_gradients_of_trees(framework):
    tree = {"a": framework.tensor([2.0, 3.0]), "mode": None}
    y, z = framework.tensor([5.0, 7.0]), framework.tensor(2.0)
    fn = lambda tree, y, z: ops.sum(tree["a"] * tree["a"] * y) * z
    value, gradients = op_value_and_grad(fn, argnums=(2, 0))(tree, y, z)
    framework.check_equal(value, np.array(166.0))
    framework.check_equal(gradients[0], np.array(83.0))
    framework.check_equal(gradients[1], {"a": np.array([40.0, 84.0]), "mode": None})


@pytest.mark.parametrize(
    ("fn", "argnums", "text"),
    [
        (lambda x: x, 0, "the function must return one real scalar, got "),
        (lambda x: ops.sum(x), 1, "argnums must number different positional arguments, got 1 "),
        (lambda x: ops.sum(x), (0, 0), "argnums must number different positional arguments, got "),
    ],
)
def test_wrong_calls_of_value_and_grad(framework, fn, argnums, text):
    with pytest.raises(CustomGradientTypeError) as caught:
        op_value_and_grad(fn, argnums)(framework.tensor([2.0, 3.0]))
    assert str(caught.value).startswith(f"op_value_and_grad(<lambda>): {text}")
    with pytest.raises(CustomGradientTypeError, match=r"^op_value_and_grad: the function must be"):
        op_value_and_grad(3.0)
