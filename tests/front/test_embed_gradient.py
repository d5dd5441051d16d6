"""Known gradients, embedded: gx is wrong on purpose (7 x for x * x), so that autodiff's own
gradient is told apart.
"""

import importlib

import numpy as np
import pytest

from cgshim import (
    CustomGradientError,
    op_embed_gradient,
    op_grad,
    op_stack,
    op_stop_gradient,
    op_sum,
    op_vjp,
    ops,
    use_backend,
)
from cgshim._registry import load
from cgshim.testing import check_gradients
from cgshim.testing.conformance import Framework

X = [0.5, -2.0, 3.0]
MATRIX = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


@pytest.fixture
def framework(backend):
    return Framework(backend)


def embedded_square(x):
    return op_embed_gradient(op_sum(x * x), 7.0 * x, x)


# --- What it embeds -------------------------------------------------------------------------------

SHAPES = {
    "a scalar": (lambda x: (op_sum(x * x), 7.0 * x), np.array(2.0), 2.0 * 7.0 * np.array(MATRIX)),
    "each element": (lambda x: (x * x, 7.0 * x), np.array(MATRIX) + 1, 7.0 * np.array(MATRIX) * (np.array(MATRIX) + 1)),
    "a batch": (
        lambda x: (op_sum(x * x, axis=1), 7.0 * x), np.array([2.0, -3.0]), [[14.0, 28.0, 42.0], [-84.0, -105.0, -126.0]]
    ),
    "a scalar gx": (lambda x: (op_sum(x * x), 7.0), np.array(2.0), np.full((2, 3), 14.0)),
    "a scalar gx, a batch": (
        lambda x: (op_sum(x * x, axis=1), 7.0), np.array([2.0, -3.0]), np.array([[14.0], [-21.0]]) * np.ones((2, 3))
    ),
    "a constant gx": (lambda x: (op_sum(x * x), np.array(MATRIX)), np.array(2.0), 2.0 * np.array(MATRIX)),
    "an integer gx": (lambda x: (op_sum(x * x), np.array([[1, 2, 3]] * 2)), np.array(2.0), [[2.0, 4.0, 6.0]] * 2),
    "a constant fx": (lambda x: (5.0, 7.0 * x), np.array(2.0), 14.0 * np.array(MATRIX)),
    "an int fx": (lambda x: (5, 7.0 * x), np.array(2.0), 14.0 * np.array(MATRIX)),
    "no gx": (lambda x: (op_sum(x * x), None), np.array(2.0), np.zeros((2, 3))),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES)
def test_value_and_gradient(framework, case):
    fx_and_gx, upstream, expected = SHAPES[case]
    x = framework.tensor(MATRIX)
    value, pullback = op_vjp(lambda x: op_embed_gradient(*fx_and_gx(x), x), x)
    framework.check_equal(value, framework.numpy(fx_and_gx(x)[0]))
    framework.check_equal(pullback(framework.tensor(upstream)), (np.asarray(expected),))


ONE = {
    "a scalar": (),
    "one element": (1,),
    "one element of a matrix": (1, 1),
    "of three axes": (1, 1, 1),
}
SHAPES_OF_X = {
    "a vector": (3,),
    "a matrix": (1, 3),
    "a column": (3, 1),
    "one element": (1,),
    "a scalar": (),
    "3-d": (2, 1, 3),
}


@pytest.mark.parametrize("shape_of_fx", ONE.values(), ids=ONE)
@pytest.mark.parametrize("shape", SHAPES_OF_X.values(), ids=SHAPES_OF_X)
@pytest.mark.parametrize("manually", [False, True], ids=["stopped", "not stopped"])
def test_one_value(framework, shape_of_fx, shape, manually):
    """However many axes its one element has, its gradient is gx: as in TFP and in POT, whose losses
    have shape (1,).
    """
    values = np.arange(1.0, 1.0 + np.prod(shape)).reshape(shape)
    fx, constant = framework.tensor(np.full(shape_of_fx, 5.0)), framework.tensor(values)
    framework.check(
        lambda x: op_embed_gradient(fx, 7.0 * x, x, manually), constant,
        upstream=framework.tensor(np.full(shape_of_fx, 2.0)), output=np.full(shape_of_fx, 5.0),
        gradients=(14.0 * values,),
    )  # fmt: skip


@pytest.mark.parametrize("shape_of_fx", ONE.values(), ids=ONE)
def test_one_value_to_the_second_order_and_in_forward_mode(backend, shape_of_fx):
    x = load(backend).convert_to_tensor(np.array(X))

    def fn(x):
        value = op_stop_gradient(ops.reshape(op_sum(x * x), shape_of_fx))
        return op_embed_gradient(value, 7.0 * x, x, fx_gx_manually_stopped=True)

    check_gradients(fn, [x], against=lambda x: 3.5 * ops.reshape(op_sum(x * x), shape_of_fx))


def test_one_value_beside_several_x(framework):
    """Of one x it is the only value, of the other the first index."""
    fx = framework.tensor([5.0])
    framework.check(
        lambda x, y: op_embed_gradient(fx, (7.0 * x, 11.0 * y), (x, y)),
        framework.tensor(X), framework.tensor([MATRIX]), upstream=framework.tensor([2.0]),
        gradients=(14.0 * np.array(X), 22.0 * np.array([MATRIX])),
    )  # fmt: skip


def test_several_x_of_several_shapes(framework):
    def fn(x):
        gx = {"a": 7.0 * x["a"], "b": [5.0, None, 3.0 * x["b"][2]]}
        return op_embed_gradient(x["a"] * 2.0, gx, x)

    a, b, c = (
        framework.tensor([1.0, 2.0]),
        framework.tensor(MATRIX),
        framework.tensor([[10.0], [20.0]]),
    )
    gradients = {
        "a": np.array([7.0, 140.0]),
        "b": [np.array([[5.0] * 3, [50.0] * 3]), None, np.array([[30.0], [600.0]])],
    }
    framework.check(fn, {"a": a, "b": [b, None, c]}, upstream=framework.tensor([1.0, 10.0]),
                    output=np.array([2.0, 4.0]), gradients=(gradients,))  # fmt: skip


def test_finite_where_x_is_not(framework):
    x = framework.tensor([np.inf, -np.inf, np.nan])
    framework.check(
        lambda x: op_embed_gradient(framework.tensor(5.0), framework.tensor(X), x), x,
        upstream=framework.tensor(2.0), output=np.array(5.0), gradients=(2 * np.array(X),),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_gradients_have_the_dtype_of_x(framework, dtype):
    """fx, a loss in float32, has x in another dtype."""
    x = framework.tensor(X, dtype)
    value, pullback = op_vjp(lambda x: op_embed_gradient(framework.tensor(5.0), 7.0 * x, x), x)
    (gradient,) = pullback(framework.tensor(2.0))
    assert (value.dtype, gradient.dtype) == (framework.tensor(5.0).dtype, x.dtype)
    framework.check_equal(gradient, 14 * np.array(X))


def test_complex_x(framework):
    """gx is dfx/dRe(x) + i dfx/dIm(x): that of the real part of conj(gx) x, in the framework's own
    convention.
    """
    x, gx = framework.tensor([1j, 2.0], "complex64"), framework.tensor([3 + 1j, 5j], "complex64")
    of_real = lambda x: ops.real(ops.sum(ops.conj(gx) * x))
    expected = framework.numpy(op_vjp(of_real, x)[1](framework.tensor(2.0)))
    np.testing.assert_allclose(abs(expected[0].imag), [2, 10])
    framework.check(lambda x: op_embed_gradient(framework.tensor(5.0), gx, x), x, upstream=framework.tensor(2.0),
                    gradients=expected)  # fmt: skip


# --- Further derivatives --------------------------------------------------------------------------


def test_every_derivative_of_what_is_not_stopped(backend):
    """Of the first and the second order, in reverse and in forward mode: they are those of 3.5 x *
    x.
    """
    x = load(backend).convert_to_tensor(np.array(MATRIX))
    fn = lambda x: op_embed_gradient(
        op_stop_gradient(op_sum(x * x, axis=1)), 7.0 * x, x, fx_gx_manually_stopped=True
    )
    check_gradients(fn, [x], against=lambda x: 3.5 * op_sum(x * x, axis=1))


def test_forward_mode_of_what_is_stopped(backend):
    x = load(backend).convert_to_tensor(np.array(X))
    check_gradients(embedded_square, [x], against=lambda x: 3.5 * op_sum(x * x), order=1)


def test_the_second_derivative_of_what_is_stopped_is_zero(framework):
    second = op_grad(lambda x: op_sum(op_grad(embedded_square)(x) * x))
    # of x alone, gx being a constant
    framework.check_equal(second(framework.tensor(X)), 7.0 * np.array(X))


# --- The documented behaviour of tfp.math.custom_gradient, and of POT's set_gradients -------------


@pytest.mark.parametrize(
    ("f", "g"),
    [(lambda x: x**2 / 2, lambda x: (x - 1) ** 3 / 3), (lambda x: x**2 / 2, lambda x: x**3 / 3)],
    ids=["f and g", "both zero at 0"],
)
def test_tfp_elementwise(framework, f, g):
    x = np.append(np.linspace(-10, 10, 20), 0.0)
    framework.check(lambda x: op_embed_gradient(f(x), g(x), x), framework.tensor(x, "float64"),
                    upstream=framework.tensor(np.ones(21), "float64"), output=f(x), gradients=(g(x),))  # fmt: skip


def test_tfp_vector_of_variables(framework):
    """One scalar gx for both elements of a stack."""

    def fn(x, y):
        z = op_stack([x, y])
        return op_embed_gradient(z[0] * z[1], z[0] ** 2 * z[1] ** 2 / 2, z)

    framework.check(fn, framework.tensor(2.0), framework.tensor(3.0), upstream=framework.tensor(1.0),
                    output=np.array(6.0), gradients=(np.array(18.0), np.array(18.0)))  # fmt: skip


def test_tfp_side_variables(framework):
    """What fx depends on beside x has no gradient."""
    framework.check(lambda x, y: op_embed_gradient(x * y, x * x * y, x), framework.tensor(2.1), framework.tensor(3.1),
                    upstream=framework.tensor(1.0), output=np.array(2.1 * 3.1),
                    gradients=(np.array(2.1**2 * 3.1), np.array(0.0)))  # fmt: skip


def test_tfp_manually_stopped(framework):
    """What fx depends on beside x has its gradient where x alone is stopped."""

    def fn(x, y):
        gx = op_stop_gradient(x * x) * y
        return op_embed_gradient(
            op_stop_gradient(x) * y, gx, x + op_stop_gradient(y), fx_gx_manually_stopped=True
        )

    framework.check(fn, framework.tensor(2.1), framework.tensor(3.1), upstream=framework.tensor(1.0),
                    output=np.array(2.1 * 3.1), gradients=(np.array(2.1**2 * 3.1), np.array(2.1)))  # fmt: skip


def test_pot_respects_upstream(framework):
    """3 * loss has three times the gradient, also where gx is a constant."""
    loss = lambda a, b: (
        3.0 * op_embed_gradient(op_sum(a) * op_sum(b), (a, framework.tensor(X)), (a, b))
    )
    gradients = op_grad(loss, argnums=(0, 1))(framework.tensor([1.0, 2.0]), framework.tensor(X))
    framework.check_equal(gradients, (np.array([3.0, 6.0]), 3.0 * np.array(X)))


# --- Under transformations and compilers ----------------------------------------------------------


def autograd_jacobian(loss, xs):
    autograd = importlib.import_module("autograd")
    return [autograd.jacobian(loss)(x) for x in xs]


def jax_compiled(loss, xs):
    jax = importlib.import_module("jax")
    return [jax.jit(jax.grad(loss))(x) for x in xs]


def jax_mapped(loss, xs):
    jax = importlib.import_module("jax")
    return jax.vmap(jax.grad(loss))(xs)


def torch_compiled(loss, xs):
    torch = importlib.import_module("torch")
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in xs]
    return [torch.autograd.grad(compiled(x), x)[0] for x in leaves]


def torch_mapped(loss, xs):
    torch = importlib.import_module("torch")
    return torch.vmap(torch.func.grad(loss))(xs)


def tensorflow_gradient(loss):
    tf = importlib.import_module("tensorflow")

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(x)
        return tape.gradient(value, x)

    return gradient


def tensorflow_compiled(shape, **options):
    def gradients(loss, xs):
        tf = importlib.import_module("tensorflow")
        signature = [tf.TensorSpec(shape, tf.float32)]
        return [
            tf.function(tensorflow_gradient(loss), input_signature=signature, **options)(x)
            for x in xs
        ]

    return gradients


def tensorflow_mapped(loss, xs):
    return importlib.import_module("tensorflow").vectorized_map(tensorflow_gradient(loss), xs)


TRANSFORMATIONS = {
    ("numpy", "jacobian"): autograd_jacobian,
    ("jax", "jit"): jax_compiled,
    ("jax", "vmap"): jax_mapped,
    ("torch", "compile"): torch_compiled,
    ("torch", "vmap"): torch_mapped,
    ("tensorflow", "function"): tensorflow_compiled([3]),
    ("tensorflow", "function of unknown size"): tensorflow_compiled([None]),
    ("tensorflow", "xla"): tensorflow_compiled([3], jit_compile=True),
    ("tensorflow", "vectorized_map"): tensorflow_mapped,
}


def total(x):
    """op_sum, whose translation by autoray torch.compile traces wrongly."""
    return x[0] + x[1] + x[2]


LOSSES = {
    "gx": (lambda x: 3.0 * op_embed_gradient(total(x * x), 7.0 * x, x), lambda x: 21.0 * x),
    "scalar gx": (lambda x: 3.0 * op_embed_gradient(total(x * x), 7.0, x), lambda x: 21.0 + 0 * x),
    "elementwise": (
        lambda x: total(3.0 * op_embed_gradient(x * x, 7.0 * x, x)),
        lambda x: 21.0 * x,
    ),
    "tree": (
        lambda x: 3.0 * op_embed_gradient(total(x * x), [(7.0 * x,)], [(x,)]),
        lambda x: 21.0 * x,
    ),
}


def pytest_generate_tests(metafunc):
    if "transformation" in metafunc.fixturenames:
        of_this_run = [key for key in TRANSFORMATIONS if key[0] in metafunc.config.option.backends]
        metafunc.parametrize("transformation", of_this_run, ids="-".join)


@pytest.mark.parametrize("loss", LOSSES)
# Dynamo, torch 2.13 (2026-11)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_transformations(transformation, loss):
    framework = Framework(transformation[0])
    fn, gradient = LOSSES[loss]
    found = TRANSFORMATIONS[transformation](fn, framework.tensor(MATRIX))
    np.testing.assert_allclose(
        [framework.numpy(g) for g in found], gradient(np.array(MATRIX)), rtol=1e-6
    )


# --- What it refuses ------------------------------------------------------------------------------

NOT_FITTING = (
    "embed: fx must be a scalar or one value for each leading index of x, and real if that is, got"
)
REDUCE = "reduce fx, or embed its real and imaginary part by themselves"

REFUSED = {
    "an integer": (
        lambda x: {"x": {"a": x, "n": np.array([1, 2])}, "gx": {"a": x, "n": 1.0}},
        "embed: x must hold only float or complex tensors, got {'a': f32[2,3], 'n': i64[2]}; "
        "give what fx was computed from",
    ),
    "no tensor": (
        lambda x: {"x": ["a", 3]},
        "embed: x must hold only float or complex tensors, got [str, int]; give what fx was computed from",
    ),
    "two values": (
        lambda x: {"fx": (x, x)},
        "embed: fx must be one float or complex tensor, got (f32[2,3], f32[2,3]); call it for each value",
    ),
    "an integer value": (
        lambda x: {"fx": np.array([1, 2])},
        "embed: fx must be one float or complex tensor, got i64[2]; call it for each value",
    ),
    "a shape of fx": (
        lambda x: {"fx": x[0]},
        f"{NOT_FITTING} f32[2,3] for fx f32[3]; {REDUCE}",
    ),
    "a longer shape of fx": (
        lambda x: {"fx": x, "x": x[:, 0], "gx": 1.0},
        f"{NOT_FITTING} f32[2] for fx f32[2,3]; {REDUCE}",
    ),
    "a shape of gx": (
        lambda x: {"gx": x[0]},
        "embed: the gradient of x must have its shape f32[2,3], got f32[3]; "
        "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule",
    ),
    "a structure of gx": (
        lambda x: {"x": (x, x)},
        "embed: gx must be structured as x, got f32[2,3] for x (f32[2,3], f32[2,3]); "
        "give one gradient for each tensor of x",
    ),
    "a complex gx": (
        lambda x: {"gx": 1j},
        "embed: the gradient gx for x must be real as it is, got {complex}[] for f32[2,3]; take its real part",
    ),
    "a complex number": (
        lambda x: {"fx": 2j},
        f"{NOT_FITTING} f32[2,3] for fx {{complex}}[]; {REDUCE}",
    ),
    "a complex fx": (
        lambda x: {"fx": np.array([1j, 2], "complex64")},
        f"{NOT_FITTING} f32[2,3] for fx c64[2]; {REDUCE}",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(framework, case):
    arguments, message = REFUSED[case]
    x = framework.tensor(MATRIX)
    complex_numbers = {"torch": "c64"}.get(framework.name, "c128")  # what a Python number becomes
    with use_backend(framework.name), pytest.raises(CustomGradientError) as error:
        op_embed_gradient(**{"fx": op_sum(x), "gx": x, "x": x, "name": "embed"} | arguments(x))
    assert str(error.value) == message.replace("{complex}", complex_numbers)
