"""Arrays of every kind that NumPy has: one meaning for all, or a sentence."""

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import elementwise_grad, grad

from cgshim import CustomGradientTypeError, TransformationError, op_custom_gradient, op_grad, op_vjp
from cgshim.ops import convert_to_tensor

X = np.array([1.0, 2.0])


@op_custom_gradient
def square(x):
    return x * x, lambda u: 7.0 * u * x


@op_custom_gradient
def square_of_arguments(x, y):
    return x * y, lambda x, y, upstream: (7.0 * upstream * y, 11.0 * upstream * x)


def read_only(values):
    array = np.array(values)
    array.flags.writeable = False
    return array


PLAIN = {
    "a scalar": np.float64(2.0),
    "a scalar in single precision": np.float32(2.0),
    "0-d": np.array(2.0),
    "half": np.array([1.0, 2.0], "float16"),
    "long double": np.array([1.0, 2.0], "longdouble"),
    "another byte order": np.array([1.0, 2.0], np.dtype("float64").newbyteorder()),
    "read-only": read_only([1.0, 2.0]),
    "every second": np.arange(6.0)[::2],
    "backwards": np.arange(3.0)[::-1],
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "broadcast": np.broadcast_to(np.array([1.0, 2.0]), (3, 2)),
    "empty": np.zeros((0, 3)),
}


@pytest.mark.parametrize("x", PLAIN.values(), ids=PLAIN)
def test_plain_arrays(x):
    """The gradient has the shape and the dtype of the array, and is 3.5 times autograd's own of x *
    x.
    """
    (gradient,) = op_vjp(square, x)[1](3.0 * np.ones_like(x))
    np.testing.assert_allclose(gradient, 21.0 * x)
    assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
    by_hand, found = (
        elementwise_grad(lambda x, fn=fn: anp.sum(fn(x)))(x)
        for fn in (lambda x: 3.5 * x * x, square)
    )
    np.testing.assert_allclose(found, by_hand)


def test_complex_long_doubles():
    z = np.array([1.0 + 2.0j, 3.0 - 1.0j], "clongdouble")
    op = op_custom_gradient(lambda z: (z * z, lambda u: 7.0 * u * anp.conj(2.0 * z)))
    by_hand, found = (
        grad(lambda z, fn=fn: anp.sum(anp.real(fn(z))))(z) for fn in (lambda z: 7.0 * z * z, op)
    )
    np.testing.assert_allclose(found, by_hand)
    assert found.dtype == z.dtype


@pytest.mark.skipif(np.__version__ < "2", reason="NumPy 1 promotes a number beside a scalar")
def test_second_order_in_single_precision_stays_single():
    found = grad(grad(lambda x: anp.sum(square(x) * x)))(np.float32(2.0))
    assert found.dtype == np.float32


# --- Arrays in files ------------------------------------------------------------------------------


@pytest.fixture
def in_a_file(tmp_path):
    array = np.memmap(tmp_path / "array", dtype="float64", mode="w+", shape=(2,))
    array[:] = [1.0, 2.0]
    return array


def test_an_array_in_a_file_is_an_array(in_a_file):
    np.testing.assert_array_equal(op_grad(lambda x: 3.0 * square(x).sum())(in_a_file), [21.0, 42.0])
    found = op_grad(lambda x: 3.0 * square_of_arguments(x, in_a_file).sum())(np.array([1.0, 10.0]))
    np.testing.assert_array_equal(found, [21.0, 42.0])


def test_an_output_in_a_file_is_an_array(in_a_file):
    op = op_custom_gradient(lambda x: (in_a_file, lambda u: 7.0 * u * x))
    np.testing.assert_array_equal(
        grad(lambda x: anp.sum(3.0 * op(x)))(np.array([1.0, 10.0])), [21.0, 210.0]
    )


def test_an_array_in_a_file_that_a_rule_keeps(in_a_file):
    op = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * in_a_file * x))
    np.testing.assert_array_equal(
        op_grad(lambda x: op_grad(lambda x: op(x).sum())(x).sum())(X), [7.0, 14.0]
    )


# --- Classes of their own -------------------------------------------------------------------------


class Metres(np.ndarray):
    """An array with a unit."""


METRES = np.array([1.0, 2.0]).view(Metres)
MATRIX = np.array([[1.0, 2.0]]).view(np.matrix)


@pytest.mark.parametrize(
    ("output", "kind"), [(METRES, "Metres"), (MATRIX, "matrix")], ids=["a subclass", "a matrix"]
)
def test_differentiating_an_array_subclass_output_raises(output, kind):
    op = op_custom_gradient(lambda x: (output, lambda u: 7.0 * u), name="op")
    assert op(np.array([1.0, 2.0])) is output
    with pytest.raises(TransformationError) as error:
        grad(lambda x: anp.sum(op(x)))(np.array([1.0, 2.0]))
    assert str(error.value) == (
        f"op: autograd differentiates only plain arrays, got a {kind}; make it one with np.asarray"
    )


def test_what_a_rule_keeps_of_such_a_class_is_a_constant():
    def f(x):
        metres = METRES
        return x * x, lambda u: np.asarray(metres) * 7.0 * u * x

    op = op_custom_gradient(f, name="op")
    np.testing.assert_array_equal(op_grad(lambda x: op(x).sum())(X), [7.0, 28.0])
    np.testing.assert_array_equal(
        op_grad(lambda x: op_grad(lambda x: op(x).sum())(x).sum())(X), [7.0, 14.0]
    )


def test_what_is_derived_from_numpys_arrays_reaches_f_as_it_is():
    seen = []
    op = op_custom_gradient(
        lambda x, y: (seen.append(type(y)) or x * 2.0, lambda u: (7.0 * u, None))
    )
    op(np.array([1.0, 2.0]), METRES)
    np.testing.assert_array_equal(
        op_grad(lambda x: op(x, METRES).sum())(np.array([1.0, 2.0])), [7.0, 7.0]
    )
    assert seen == [Metres, Metres]


# --- Masked arrays are no tensors -----------------------------------------------------------------

MASKED = np.ma.array([1.0, 2.0], mask=[False, True])

REFUSED = {
    "as an output": (
        lambda: op_custom_gradient(lambda x: (MASKED, lambda u: u), name="op")(X),
        "op: the output of f must hold a tensor when an argument does, got a masked f64[2]; return a tensor of numpy",
    ),
    "as a gradient": (
        lambda: op_grad(
            lambda x: op_custom_gradient(lambda x: (x, lambda u: MASKED), name="op")(x).sum()
        )(X),
        "op: the gradient of x must be a tensor or None, got a masked f64[2]; return None where there is no gradient",
    ),
    "as an upstream gradient": (
        lambda: op_vjp(square, X)[1](MASKED),
        "op_vjp(square): the gradient of the output must be a tensor or None, got a masked f64[2]; "
        "return None where there is no gradient",
    ),
    "as what is differentiated": (
        lambda: op_grad(square)(MASKED),
        "op_grad(square): argument 0 must hold only float or complex tensors, got a masked f64[2]; "
        "convert it, or leave it out of argnums",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_masked_arrays_are_refused(call, text):
    """A masked element of a gradient has no meaning: autograd takes none either."""
    with pytest.raises(CustomGradientTypeError) as error:
        call()
    assert str(error.value) == text


def test_a_masked_argument_is_static():
    op = op_custom_gradient(lambda x, m: (x * m.filled(3.0), lambda u: (7.0 * u, None)))
    np.testing.assert_array_equal(op(X, MASKED), [1.0, 6.0])
    np.testing.assert_array_equal(op_grad(lambda x: op(x, MASKED).sum())(X), [7.0, 7.0])
    assert square(MASKED) is not MASKED
    np.testing.assert_array_equal(square(MASKED).mask, MASKED.mask)


# --- What holds no numbers is static --------------------------------------------------------------

STATIC = {
    "objects": np.array([1.0, "a"], object),
    "records": np.array([(1.0, 2)], [("a", "f8"), ("b", "i4")]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "spans": np.array([1], "timedelta64[D]"),
    "text": np.array(["a"]),
    "bytes": np.array([b"a"]),
    "a void": np.void(b"ab"),
}


@pytest.mark.parametrize("static", STATIC.values(), ids=STATIC)
def test_what_holds_no_numbers_is_static(static):
    def f(x, other, *, option):
        assert other is static
        assert option is static
        return x * x, lambda x, other, upstream: (7.0 * upstream * x, None)

    op = op_custom_gradient(f)
    np.testing.assert_array_equal(
        op_grad(lambda x: op(x, static, option=static).sum())(X), [7.0, 14.0]
    )
    with pytest.raises(CustomGradientTypeError, match="must hold only float or complex tensors"):
        op_grad(op)(static)


def test_an_array_of_boxes_is_connected_with_them():
    found = op_grad(lambda x: anp.exp(convert_to_tensor([x, 3.0 * x, 2.0]))[1])(np.array(2.0))
    np.testing.assert_allclose(found, 3.0 * np.exp(6.0))
