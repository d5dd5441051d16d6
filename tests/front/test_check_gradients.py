"""The checker finds what it is there to find, says where it is, and lets right rules pass."""

import importlib
import re

import numpy as np
import pytest

import cgshim
from cgshim import (
    CustomGradientError,
    CustomGradientValueError,
    TransformationError,
    op_custom_gradient,
    op_stop_gradient,
    ops,
)
from cgshim._registry import load
from cgshim._transforms import jvp_of
from cgshim.testing import _functions, check_gradients

VECTOR = [0.5, -2.0, 3.0]


def tensors(backend, *values):
    return [load(backend).convert_to_tensor(np.asarray(value)) for value in values]


# --- Eight mistakes, each beside the rule without it ----------------------------------------------


def missing_upstream(mistaken):
    return lambda x, y: (x * y, lambda u: (y, u * x) if mistaken else (u * y, u * x))


def wrong_sign(mistaken):
    return lambda x, y: (x - 2 * y, lambda u: (u, 2 * u if mistaken else -2 * u))


def swapped_arguments(mistaken):
    return lambda x, y: (x * y, lambda u: (u * x, u * y) if mistaken else (u * y, u * x))


def wrong_shape(mistaken):
    """y is spread over x, and its gradient has to be summed."""
    return lambda x, y: (
        x * y[0],
        lambda u: (u * y[0], u * x if mistaken else ops.sum(u * x) * ops.ones_like(y)),
    )


def ignored_second_output(mistaken):
    def f(x, y):
        return (x * x, x * y), lambda u: (2 * u[0] * x + u[1] * y, 0 * y if mistaken else u[1] * x)

    return f


def conjugate_error(mistaken):
    """One convention for every framework: the gradient of z * w by z is u * conj(w)."""
    take = (lambda z: z) if mistaken else ops.conj
    return lambda x, y: (x * y, lambda u: (u * take(y), u * take(x)))


def wrong_second_order(mistaken):
    slope = op_custom_gradient(
        lambda x: (3 * x * x, lambda u: u * (5 if mistaken else 6) * x),
        forward_mode=True,
        name="slope",
    )
    return lambda x, y: (x * x * x + y, lambda u: (u * slope(x), u))


def right_for_a_uniform_upstream(mistaken):
    return lambda x, y: (x * x - y, lambda u: (2 * x * (ops.mean(u) if mistaken else u), -u))


def right_for_a_positive_upstream(mistaken):
    return lambda x, y: (ops.sum(x * y), lambda u: (u * y, (ops.abs(u) if mistaken else u) * x))


def right_without_negative_upstreams(mistaken):
    return lambda x, y: (x * y, lambda u: (u * y, (ops.maximum(u, 0.0) if mistaken else u) * x))


def product_of_two_upstreams(mistaken):
    def f(x, y):
        return (x * y, x - y), lambda d1, d2: (
            d1 * y + d2 + (d1 * d2 if mistaken else 0.0),
            d1 * x - d2,
        )

    return f


def right_for_one_output_at_a_time(mistaken):
    def f(x, y):
        def grad(d1, d2):
            if mistaken:
                return ops.where(ops.sum(ops.abs(d1)) > 0, d1 * y, d2), d1 * x - d2
            return d1 * y + d2, d1 * x - d2

        return (x * y, x - y), grad

    return f


def wrong_where_little_is_needed(mistaken):
    def f(x, y):
        def grad(u, needs_input_grad):
            return u * y, (3.0 if mistaken and not all(needs_input_grad) else 1.0) * u * x

        return x * y, grad

    return f


def wrong_where_the_function_is_small(mistaken):
    return lambda x, y: (
        1e-7 * x * y,
        lambda u: (1e-7 * u * y, (-1e-7 if mistaken else 1e-7) * u * x),
    )


SPREAD = (VECTOR, [7.0])
SAME = (VECTOR, [7.0, 11.0, 13.0])
COMPLEX = ([0.5 + 2j, -2.0 + 1j], [7.0 - 3j, 1j])


def in_reverse(of, output="output", order=1):
    """What is said of a wrong gradient."""
    got = r"must be that of central differences \(reverse mode\), got \S+ where \S+ is expected"
    return rf", order {order}: the gradient of {of} through {output} {got}"


MISTAKES = {
    missing_upstream: (SAME, in_reverse(r"x\[\d\]")),
    wrong_sign: (SAME, in_reverse(r"y\[\d\]")),
    swapped_arguments: (SAME, in_reverse(r"x\[\d\]")),
    wrong_shape: (SPREAD, r": the gradient of y must have its shape f64\[1\], got f64\[3\]"),
    ignored_second_output: (SAME, in_reverse(r"y\[\d\]", r"output\[1\]")),
    conjugate_error: (COMPLEX, in_reverse(r"x\[\d\].(real|imag)")),
    wrong_second_order: (SAME, in_reverse(r"x\[\d\]", "the gradient of x", order=2)),
    right_for_a_uniform_upstream: (SAME, in_reverse(r"x\[\d\]")),
    right_for_a_positive_upstream: (SAME, in_reverse(r"y\[\d\]")),
    right_without_negative_upstreams: (SAME, in_reverse(r"y\[\d\]")),
    product_of_two_upstreams: (SAME, in_reverse(r"x\[\d\]", "all outputs at once")),
    right_for_one_output_at_a_time: (SAME, in_reverse(r"x\[\d\]", "all outputs at once")),
    wrong_where_little_is_needed: (SAME, in_reverse(r"y\[\d\]", "output, needed by itself")),
    wrong_where_the_function_is_small: (SAME, in_reverse(r"y\[\d\]")),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_each_mistake_is_found_and_named(backend, mistake):
    values, message = MISTAKES[mistake]
    args = tensors(backend, *values)
    with cgshim.use_backend(backend):
        check_gradients(op_custom_gradient(mistake(False), forward_mode=True), args)
        with pytest.raises((AssertionError, CustomGradientValueError), match="^planted" + message):
            check_gradients(
                op_custom_gradient(mistake(True), forward_mode=True, name="planted"), args
            )


# --- What it says ---------------------------------------------------------------------------------

FACTORS = np.array([[2.0, 2.0], [9.0, 2.0]])
"""Of x in the gradient of x * x: wrong in one element alone."""


def half_wrong_square(x):
    return x * x, lambda u: u * ops.multiply(FACTORS, x)


def raised(error, *args, **kwargs):
    with pytest.raises(error) as caught:
        check_gradients(*args, **kwargs)
    return str(caught.value)


MESSAGES = {
    "reverse": "half_wrong_square, order 1: the gradient of x[1,0] through output must be that of central differences "
    "(reverse mode), got # where # is expected; fix the rule, or state a surrogate with against=",
    "forward": "half_wrong_square, order 1: the tangent of output[1,0] along x must be that of central differences "
    "(forward mode), got # where # is expected; fix the rule, or state a surrogate with against=",
}


@pytest.mark.parametrize("mode", MESSAGES)
def test_message(backend, mode):
    op = op_custom_gradient(half_wrong_square, forward_mode=True)
    message = raised(AssertionError, op, tensors(backend, [[0.5, -2.0], [3.0, 1.5]]), modes=[mode])
    number = r"-?\d+\.\d+"  # depends on what is random
    assert re.sub(number, "#", message) == MESSAGES[mode]
    got, expected = map(float, re.findall(number, message))
    assert got / expected == pytest.approx(4.5, rel=1e-4)


def test_differences_that_are_not_finite_are_no_mismatch(backend):
    """The root of x - 3 at 3, one step to the left."""
    root = op_custom_gradient(lambda x: (ops.sqrt(x - 3.0), lambda u: u), name="root")
    with np.errstate(invalid="ignore"):
        message = raised(AssertionError, root, tensors(backend, [4.0, 3.0]))
    assert message == (
        "root, order 1: the central difference of output[1] along x must be finite, got nan; "
        "nothing is known of the gradient there: check it where the function is finite"
    )


def test_a_gradient_that_is_not_finite_is_a_mismatch(backend):
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: u * ops.multiply(np.array([np.nan, 2.0]), x)), name="op"
    )
    message = raised(AssertionError, op, tensors(backend, [4.0, 3.0]), modes=["reverse"])
    assert re.sub(r"-?\d+\.\d+", "#", message) == (
        "op, order 1: the gradient of x[0] through output must be that of central differences (reverse mode), "
        "got nan where # is expected; fix the rule, or state a surrogate with against="
    )


def test_a_tangent_that_is_not_finite_is_a_mismatch(backend):
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: u * ops.multiply(np.array([np.nan, 2.0]), x)),
        forward_mode=True,
        name="op",
    )
    message = raised(AssertionError, op, tensors(backend, [4.0, 3.0]), modes=["forward"])
    assert re.sub(r"-?\d+\.\d+", "#", message) == (
        "op, order 1: the tangent of output[0] along x must be that of central differences (forward mode), "
        "got nan where # is expected; fix the rule, or state a surrogate with against="
    )


def test_unpromised_forward_mode_is_the_rule_or_raises(backend):
    """3 x in the rule for x * x: what autodiff says, 2 x, would pass."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 3 * u * x))
    with pytest.raises((AssertionError, TransformationError)):
        check_gradients(op, tensors(backend, VECTOR), modes=["forward"])


CUT_OFF = (
    "cut_off, order 2: the gradient of x[0] through the gradient of x must be that of central differences (reverse "
    "mode), got # where # is expected; fix the rule, or a tensor that grad_fn keeps: one that is neither argument nor "
    "output of f is cut off if f computes it outside of the framework's operations or under stop_gradient; "
    "or state a surrogate with against="
)


def test_a_cut_off_residual_is_named_in_the_second_order(backend):
    """A right first order, whose intermediate is a constant to the framework."""

    def f(x):
        square = op_stop_gradient(x * x)
        return square * x, lambda u: u * 3 * square

    op = op_custom_gradient(f, name="cut_off")
    check_gradients(op, tensors(backend, VECTOR), order=1)
    if backend == "torch":
        with pytest.raises(TransformationError, match="where autograd does not see"):
            check_gradients(op, tensors(backend, [2.0]), modes=["reverse"])
        return
    message = raised(AssertionError, op, tensors(backend, [2.0]), modes=["reverse"])
    assert re.sub(r"-?\d+(\.\d+)?(?= where| is)", "#", message) == CUT_OFF


def test_a_kept_output_is_not_cut_off(backend):
    def f(x):
        y = op_stop_gradient(ops.exp(x))
        return y, lambda u: u * y

    check_gradients(op_custom_gradient(f), tensors(backend, VECTOR), order=3)


REFUSED = {
    "no float": (
        {"args": [np.array([1, 2])]},
        "square: args must hold a float or complex tensor, got [i64[2]]; convert one",
    ),
    "a tensor for args": (
        {"args": np.array([1.0, 2.0])},
        "square: args must be a list of the arguments, got f64[2]; write [x]",
    ),
    "no order": ({"order": 0}, "square: order must be 1 or more, got 0; write order=1"),
    "half an order": ({"order": 1.5}, "square: order must be 1 or more, got 1.5; write order=1"),
    "the name of an argument": (
        {"argnums": "x"},
        "square: argnums must name some of the 2 arguments, got 'x'; count from 0",
    ),
    "no float output": (
        {"args": [np.array([1.0, 2.0]), np.argmax]},
        "square: the output must hold a float or complex tensor, got none; there is nothing to check",
    ),
    "no such argument": (
        {"argnums": (0, 2)},
        "square: argnums must name some of the 2 arguments, got 2; count from 0",
    ),
    "an unknown mode": (
        {"modes": ["backward"]},
        'square: modes must be "reverse", "forward" or both, got [\'backward\']; write modes=("reverse",)',
    ),
    "another output": (
        {"against": lambda x: (x * x, x)},
        "square: against= must return what fn does (f64[2]), got f64[2], f64[2]; "
        "state a surrogate with the same outputs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_is_refused(case):
    arguments, message = REFUSED[case]
    square = lambda x, then=np.asarray: then(x * x)
    square.__name__ = "square"
    with pytest.raises(CustomGradientError) as error:
        check_gradients(square, **{"args": [np.array([1.0, 2.0])], **arguments})
    assert str(error.value) == message


# --- What it checks -------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", [1.0, 2.0])
def test_against_a_surrogate(backend, surrogate):
    """A step function, whose gradient is that of 1 x by intention."""
    straight_through = op_custom_gradient(
        lambda x: (ops.floor(x), lambda u: u), forward_mode=True, name="floor"
    )
    args = tensors(backend, VECTOR)
    scaled = lambda x: surrogate * x
    scaled.__name__ = "scaled"
    if surrogate == 1.0:
        check_gradients(straight_through, args, against=scaled)
    else:
        message = raised(AssertionError, straight_through, args, against=scaled)
        assert "must be that of central differences of scaled (reverse mode)" in message


@op_custom_gradient(forward_mode=True)
def tangled(pair, weights, power, *rest, half):
    """Arguments of every kind, two outputs of two shapes, and one without a gradient."""
    (a, b), w = pair, weights["w"]
    outputs = {"sum": ops.sum(a * w) + b, "product": a * rest[0] * half, "index": power}

    def grad(u):
        of_a = u["sum"] * w + u["product"] * rest[0] * half
        return (of_a, u["sum"]), {"w": u["sum"] * a, "name": None}, None, u["product"] * a * half

    return outputs, grad


def test_trees_options_and_integers(backend):
    a, b, w, power, rest = tensors(
        backend, VECTOR, 5.0, [7.0, 11.0, 13.0], [2, 3], [-1.0, 2.0, 4.0]
    )
    fn = lambda pair, weights, power, *rest: tangled(pair, weights, power, *rest, half=0.5)
    check_gradients(fn, [(a, b), {"w": w, "name": "static"}, power, rest], order=3)


def test_single_precision_is_checked_in_double(backend):
    """A relative error of 1e-5, which differences in float32 would not show."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 2.00002 * u * x))
    args = [load(backend).convert_to_tensor(VECTOR, "float32")]
    assert "is expected" in raised(
        AssertionError, op, args, rtol=1e-7, atol=1e-7, modes=["reverse"]
    )
    check_gradients(op, args, rtol=1e-3, modes=["reverse"], order=1)


LARGE = [1e8, -3e8, 1e4]
MODES = ["reverse", "forward"]


@pytest.mark.parametrize("mode", MODES)
def test_large_numbers_are_changed_by_large_steps(backend, mode):
    """Near 1e8 a change by 1e-5 would be lost in rounding, and so would the derivative of what does
    not depend on x.
    """
    right = op_custom_gradient(lambda x: (x * x * 1e-8, lambda u: 2e-8 * u * x), forward_mode=True)
    check_gradients(right, tensors(backend, LARGE), modes=[mode])
    check_gradients(squared(forward_mode=True), tensors(backend, LARGE), modes=[mode])
    wrong = op_custom_gradient(lambda x: (x * x, lambda u: 2.001 * u * x), forward_mode=True)
    assert "is expected" in raised(AssertionError, wrong, tensors(backend, LARGE), modes=[mode])


@pytest.mark.parametrize("mode", MODES)
def test_tolerances(backend, mode):
    """An error of a ten-thousandth, of numbers near 2000 and near a thousandth."""
    op = op_custom_gradient(lambda x: (x * x, lambda u: 2.0002 * u * x), forward_mode=True)
    for values, absolute in (([500.0, -1000.0], 1e4), ([5e-4, -1e-3], 1e-6)):
        args = tensors(backend, values)
        check = {"order": 1, "modes": [mode]}
        check_gradients(op, args, rtol=1e-3, atol=0.0, **check)
        check_gradients(op, args, rtol=0.0, atol=absolute, **check)
        assert "is expected" in raised(AssertionError, op, args, rtol=1e-5, atol=0.0, **check)
        assert "is expected" in raised(
            AssertionError, op, args, rtol=0.0, atol=absolute * 1e-6, **check
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["near a pole", "an oscillation"])
def test_a_function_that_bends_within_one_step(backend, case, mode):
    """By one central difference 1 / x is wrong by a hundred-thousandth at a thousandth."""
    f, derivative, values = {
        "near a pole": (lambda x: 1 / x, lambda x: -1 / (x * x), [1e-3, -2e-3]),
        "an oscillation": (lambda x: ops.sin(50 * x), lambda x: 50 * ops.cos(50 * x), [1e2, 130.0]),
    }[case]
    for factor, is_right in ((1.0, True), (1.0001, False)):
        op = op_custom_gradient(
            lambda x, factor=factor: (f(x), lambda u: u * factor * derivative(x)), forward_mode=True
        )
        args = tensors(backend, values)
        if is_right:
            check_gradients(op, args, modes=[mode])
        else:
            assert "order 1" in raised(AssertionError, op, args, modes=[mode])


def test_a_small_tangent_is_not_lost_beside_a_large_one(backend):
    """Wrong by a thousandth in the second element, which is a millionth of the first."""
    factors = np.array([2.0, 2.002])
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: u * ops.multiply(factors, x)), forward_mode=True
    )
    message = raised(AssertionError, op, tensors(backend, [1e6, 1.0]), modes=["forward"])
    assert "the tangent of output[1] along x" in message


@pytest.mark.parametrize("mistake", [1.0, 1.5])
def test_a_small_gradient_is_not_lost_beside_a_large_one(backend, mistake):
    """Wrong by a half in the second element, which is a thousand-millionth of the first."""
    factors, of_rule = np.array([1e9, 1.0]), np.array([1e9, mistake])
    op = op_custom_gradient(
        lambda x: (ops.multiply(factors, x), lambda u: ops.multiply(of_rule, u))
    )
    args = tensors(backend, [2.0, -3.0])
    if mistake == 1.0:
        check_gradients(op, args)
    else:
        message = raised(AssertionError, op, args)
        assert "order 1: the gradient of x[1] through output" in message


def test_the_tolerances_are_as_large_as_the_step_by_default(backend):
    """6e-6 of the number, and 4e-8 of the function."""
    for error, is_right in ((3e-6, True), (3e-5, False)):
        op = op_custom_gradient(
            lambda x, error=error: (x * x, lambda u: (2.0 + 2.0 * error) * u * x)
        )
        args = tensors(backend, [1e3, -1e3])
        if is_right:
            check_gradients(op, args, order=1)
        else:
            assert "is expected" in raised(AssertionError, op, args, order=1)


# --- Which modes, which order, which arguments ----------------------------------------------------


def divided(**promises):
    """x * x by a rule that is right, and not written in operations that are linear in upstream."""
    return op_custom_gradient(
        lambda x: (x * x, lambda u: 2 * x * (u * u) / u), name="divided", **promises
    )


@pytest.fixture
def forward_modes(monkeypatch):
    """What is done by the framework's forward mode, counted."""
    counted = []

    def counting_jvp_of(backend):
        counted.append(backend)
        return jvp_of(backend)

    monkeypatch.setattr(_functions, "jvp_of", counting_jvp_of)
    return counted


def squared(**promises):
    return op_custom_gradient(lambda x: (x * x, lambda u: 2 * u * x), **promises)


def test_forward_mode_is_checked_where_it_is_promised(backend, forward_modes):
    check_gradients(squared(forward_mode=True), tensors(backend, VECTOR))
    assert len(forward_modes) >= 2  # in both orders
    forward_modes.clear()
    check_gradients(squared(), tensors(backend, VECTOR))
    check_gradients(squared(forward_mode=True), tensors(backend, VECTOR), modes=["reverse"])
    assert forward_modes == []
    check_gradients(lambda x: ops.sin(x), tensors(backend, VECTOR))
    assert len(forward_modes) >= 2


def test_forward_mode_is_checked_where_there_is_a_jvp_fn(backend):
    """That one is wrong: grad_fn alone would pass."""
    f = lambda x: (x * x, lambda u: 2 * u * x, lambda dx: 3 * dx * x)
    op = op_custom_gradient(f, forward_mode=True)
    message = raised(AssertionError, op, tensors(backend, VECTOR), order=1)
    assert "the tangent of output[" in message
    check_gradients(op, tensors(backend, VECTOR), modes="reverse")


def test_forward_mode_is_not_demanded_of_others(backend):
    check_gradients(divided(), tensors(backend, VECTOR))
    check_gradients(lambda x: divided()(x) * x, tensors(backend, VECTOR))


@pytest.mark.parametrize(
    "fn", [divided(), lambda x: divided()(x) * x], ids=["an op", "a function of an op"]
)
def test_forward_mode_is_demanded_where_it_is_named(backend, fn):
    message = raised(
        TransformationError, fn, tensors(backend, VECTOR), modes=("reverse", "forward")
    )
    assert message.startswith("divided: forward mode needs a rule that is linear in upstream, got ")


def test_an_op_that_is_differentiable_once_is_checked_once(backend):
    def f(x):
        square = x * x
        return square * x, lambda u: 3 * u * square

    op = op_custom_gradient(f, once_differentiable=True, name="once")
    check_gradients(op, tensors(backend, VECTOR))
    assert raised(TransformationError, op, tensors(backend, VECTOR), order=2).startswith("once: ")
    wrong = op_custom_gradient(lambda x: (x * x, lambda u: 3 * u * x), once_differentiable=True)
    assert "order 1: the gradient of x" in raised(AssertionError, wrong, tensors(backend, VECTOR))


def test_an_op_on_the_host_is_checked_once(backend):
    class Layer:
        def act(self, x):
            return x**3, lambda u: 3 * u * x**2

        act = op_custom_gradient(act, host_outputs=lambda self, x: x, name="act")

    check_gradients(Layer().act, tensors(backend, VECTOR))
    if backend != "numpy":  # where it has a second derivative
        assert raised(CustomGradientError, Layer().act, tensors(backend, VECTOR), order=2)


def half_right(x, y):
    return x * y, lambda u: (u * y, 2 * u * x)


@pytest.mark.parametrize(
    ("argnums", "right"), [(0, True), (1, False), ((0, 1), False), ((0,), True), (-1, False)]
)
def test_argnums(backend, argnums, right):
    op = op_custom_gradient(half_right)
    args = tensors(backend, *SAME)
    if right:
        check_gradients(op, args, argnums=argnums, order=1)
    else:
        assert "the gradient of y[" in raised(AssertionError, op, args, argnums=argnums)


@pytest.mark.parametrize("mode", MODES)
def test_an_output_independent_of_the_arguments_has_zeros(backend, mode):
    (constant,) = tensors(backend, [7.0, 11.0])
    check_gradients(lambda x: (x * x, constant), tensors(backend, VECTOR), modes=[mode])
    wrong = op_custom_gradient(
        lambda x: ((x * x, constant), lambda u, v: 2 * u * x + ops.sum(v)), forward_mode=True
    )
    assert "through output[1]" in raised(
        AssertionError, wrong, tensors(backend, VECTOR), modes=["reverse"]
    )


def test_argnums_choose_arguments_and_not_tensors(backend):
    """The second argument is the tree, and its second order is checked too."""

    def f(x, tree):
        return x * tree["a"] * tree["b"], lambda u: (
            0 * u,
            {"a": u * x * tree["b"], "b": u * x * tree["a"]},
        )

    a, b = tensors(backend, [7.0, 11.0, 13.0], [3.0, 5.0, 2.0])
    args = [*tensors(backend, VECTOR), {"a": a, "b": b}]
    check_gradients(op_custom_gradient(f), args, argnums=1)
    assert "the gradient of x[" in raised(AssertionError, op_custom_gradient(f), args)


def test_any_function_can_be_checked(backend):
    check_gradients(lambda x: ops.sin(x) * ops.exp(x), tensors(backend, VECTOR), order=3)


# --- Held against the frameworks' own checkers ----------------------------------------------------


def gradcheck(op, x):
    torch = importlib.import_module("torch")
    return torch.autograd.gradcheck(op, x.requires_grad_()) and torch.autograd.gradgradcheck(op, x)


def compute_gradient(op, x):
    theoretical, numerical = importlib.import_module("tensorflow").test.compute_gradient(op, [x])
    np.testing.assert_allclose(theoretical, numerical, rtol=1e-5)


OWN_CHECKERS = {
    "numpy": lambda op, x: importlib.import_module("autograd.test_util").check_grads(
        op, modes=["rev"]
    )(x),
    "jax": lambda op, x: importlib.import_module("jax.test_util").check_grads(
        op, (x,), order=2, modes=["rev"]
    ),
    "torch": gradcheck,
    "tensorflow": compute_gradient,
}


@pytest.mark.parametrize("factor", [2.0, 2.1])
def test_the_framework_is_of_the_same_opinion(backend, factor):
    op = op_custom_gradient(lambda x: (x * x, lambda u: factor * u * x))
    (x,) = tensors(backend, VECTOR)
    for check in (OWN_CHECKERS[backend], lambda op, x: check_gradients(op, [x], modes=["reverse"])):
        if factor == 2.0:
            check(op, x)
        else:
            # torch's GradcheckError is a RuntimeError
            with pytest.raises((AssertionError, RuntimeError)):
                check(op, x)


# --- Trainable state ------------------------------------------------------------------------------


def of_variables(backend, w, b, mistake):
    """w x + b, whose rule takes the variables; the mistake is a factor of the gradient of b."""

    def f(x):
        return w * x + b, lambda u, variables: (u * w, [u * x, mistake * ops.sum(u)])

    declared = [w, b] if hasattr(load(backend), "supports_variables") else None
    return op_custom_gradient(f, name="affine", variables=declared)


def state_of(backend, *values):
    if backend == "torch":
        return [importlib.import_module("torch").nn.Parameter(x) for x in tensors(backend, *values)]
    return [importlib.import_module("tensorflow").Variable(x) for x in tensors(backend, *values)]


def test_the_gradients_of_variables(backend):
    (x,) = tensors(backend, VECTOR)
    if not hasattr(load(backend), "vjp_with_variables"):
        w, b = tensors(backend, [1.5, -0.5, 2.0], 7.0)
        with pytest.raises(
            CustomGradientError, match="differentiates only by arguments, got 2 variables"
        ):
            check_gradients(of_variables(backend, w, b, 1.0), [x], variables=[w, b])
        return
    w, b = state_of(backend, [1.5, -0.5, 2.0], 7.0)
    check_gradients(of_variables(backend, w, b, 1.0), [x], variables=[w, b])
    text = r"^affine, order 1: the gradient of variables\[1\] through output must be .* got -?\d.* where"
    with pytest.raises(AssertionError, match=text):
        check_gradients(of_variables(backend, w, b, 3.0), [x], variables=[w, b])
    np.testing.assert_array_equal(load(backend).convert_to_numpy(w), [1.5, -0.5, 2.0])
    np.testing.assert_array_equal(load(backend).convert_to_numpy(b), 7.0)


def test_the_second_order_of_variables(backend):
    """The gradient of x by w is cut, where the rule reads a constant of w's value."""
    if not hasattr(load(backend), "vjp_with_variables"):
        return
    (x,), (w,) = tensors(backend, VECTOR), state_of(backend, [1.5, -0.5, 2.0])

    def op(is_cut):
        def f(x):
            def grad(u, variables):
                return 3 * u * (op_stop_gradient(w) if is_cut else w) * x * x, [u * x * x * x]

            return w * x * x * x, grad

        return op_custom_gradient(f, name="op")

    check_gradients(op(False), [x], variables=[w])
    with pytest.raises(
        AssertionError,
        match=r"^op, order 2: the gradient of variables\[0\]\[\d\] through the gradient of x",
    ):
        check_gradients(op(True), [x], variables=[w])


def test_variables_that_cannot_be_written_to(backend):
    (x, w, b) = tensors(backend, VECTOR, [1.5, -0.5, 2.0], [0.5, 1.0, 2.0])
    if backend == "tensorflow":
        with pytest.raises(
            CustomGradientError, match="variables must be trainable state, which can be written to"
        ):
            check_gradients(of_variables(backend, w, b, 1.0), [x], variables=[w, b])


def test_a_function_that_is_slow_under_eager_jax_is_compiled(backend, monkeypatch):
    """An f that reads values cannot be, and is checked as it is."""
    monkeypatch.setattr(_functions, "SLOW", 0.0)
    (x,) = tensors(backend, VECTOR)
    runs = []

    @op_custom_gradient
    def cube(x, *, reads):
        runs.append(reads and float(cgshim.op_convert_to_numpy(x)[0]))
        return x * x * x, lambda u: u * 3 * x * x

    check_gradients(lambda x: cube(x, reads=False), [x], modes=["reverse"], order=1)
    counted = len(runs)
    check_gradients(lambda x: cube(x, reads=True), [x], modes=["reverse"], order=1)
    assert (counted < 7 < len(runs) - counted) if backend == "jax" else counted >= 7, (
        counted,
        len(runs),
    )


def test_what_is_slow_is_checked_for_one_input_alone_too(backend, monkeypatch):
    """Slow functions are compiled on JAX, but not for one input: there f learns that all are needed."""
    monkeypatch.setattr(_functions, "SLOW", -1.0)

    def f(x, y, *, needs_input_grad):
        factor = 1.0 if all(needs_input_grad) else 3.0
        return x * y, lambda u: (factor * u * y, factor * u * x)

    with pytest.raises(AssertionError, match=r"output, needed by itself must be that"):
        check_gradients(op_custom_gradient(f), tensors(backend, VECTOR, [2.0, 5.0, -1.0]))
