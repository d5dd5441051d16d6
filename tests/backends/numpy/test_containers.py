"""autograd puts containers that it differentiates into boxes: an op sees the containers."""

import collections

import autograd.numpy as anp
import numpy as np
import pytest
from autograd import grad
from autograd.builtins import tuple as tuple_of_boxes
from autograd.differential_operators import make_jvp, make_vjp
from autograd.extend import defvjp, primitive

from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    op_custom_gradient,
    op_embed_gradient,
    op_grad,
)

X = np.array([1.0, 10.0])

PACKED = {
    "a dict": (lambda a, b: {"b": b, "a": a}, lambda p: (p["a"], p["b"])),
    "a list": (lambda a, b: [a, b], lambda p: (p[0], p[1])),
    "a tuple": (lambda a, b: (a, b), lambda p: (p[0], p[1])),
    "a list in a dict": (lambda a, b: {"p": [a, b]}, lambda p: (p["p"][0], p["p"][1])),
    "a dict in a tuple": (lambda a, b: ({"a": a}, b), lambda p: (p[0]["a"], p[1])),
}
"""How two values are packed, and how they are found in what they are packed in."""


def weighted(pack, unpack, **options):
    """a x + b^2, with 7 for 1 and 11 for 2."""

    @op_custom_gradient(**options)
    def op(p, x):
        assert type(p) is type(pack(1.0, 1.0))
        a, b = unpack(p)
        return a * x + b * b, lambda u: (pack(7.0 * anp.sum(u * x), 11.0 * b * anp.sum(u)), None)

    return op


@pytest.mark.parametrize(("pack", "unpack"), PACKED.values(), ids=PACKED)
def test_a_box_as_an_argument(pack, unpack):
    op = weighted(pack, unpack)
    for values in ((2.0, 3.0), (np.array(2.0), np.array(3.0))):
        a, b = unpack(grad(lambda p: anp.sum(3.0 * op(p, X)))(pack(*values)))
        assert (a, b) == (3 * 7 * 11.0, 3 * 2 * 33.0)


@pytest.mark.parametrize(("pack", "unpack"), PACKED.values(), ids=PACKED)
def test_a_second_order_of_a_box(pack, unpack):
    first = lambda p: unpack(grad(lambda p: anp.sum(weighted(pack, unpack)(p, X)))(p))[1]
    found = unpack(grad(lambda p: 3.0 * first(p))(pack(2.0, 3.0)))
    assert found == (0.0, 66.0)


def test_a_box_within_a_list():
    op = op_custom_gradient(
        lambda ps: (ps[0]["a"] * ps[1], lambda u: [{"a": 7.0 * u * ps[1]}, 11.0 * u * ps[0]["a"]])
    )
    assert grad(lambda p: op([p, 3.0]))({"a": 2.0}) == {"a": 21.0}
    assert grad(lambda p: op([p, p["a"]]))({"a": 2.0}) == {"a": 14.0 + 22.0}


def test_a_box_in_forward_mode():
    op = weighted(*PACKED["a dict"], forward_mode=True)
    _, tangent = make_jvp(lambda p: op(p, X))({"a": 2.0, "b": 3.0})({"a": 1.0, "b": 0.5})
    np.testing.assert_allclose(tangent, 7.0 * X + 0.5 * 33.0)


def test_a_box_beside_what_names_its_leaf():
    op = op_custom_gradient(lambda p: (p["a"] * X, lambda u: {"a": u}), name="op")
    with pytest.raises(
        ValueError,
        match=r"^op: the gradient of p\['a'\] must have its shape f64\[\], got f64\[2\]; ",
    ):
        grad(lambda p: anp.sum(op(p)))({"a": 2.0})


# --- Containers that optree knows beside Python's commonest ones ----------------------------------


@op_custom_gradient(name="op")
def of_a_queue(queue):
    return queue[1] * queue[2], lambda u: collections.deque(
        [None, 7.0 * u * queue[2], 11.0 * u * queue[1]]
    )


def test_a_queue():
    """A gradient is structured as it, or flat; one of another length is refused."""
    queue = collections.deque(["static", np.array(2.0), np.array(3.0)])
    assert op_grad(of_a_queue)(queue) == collections.deque([None, 21.0, 22.0])
    flat = op_custom_gradient(lambda queue: (queue[1] * queue[2], lambda u: (7.0 * u, 11.0 * u)))
    assert op_grad(flat)(queue) == collections.deque([None, 7.0, 11.0])
    short = op_custom_gradient(
        lambda queue: (queue[1] * queue[2], lambda u: collections.deque([7.0 * u])), name="op"
    )
    with pytest.raises(
        ValueError, match=r"^op: grad_fn must return one gradient for each .*, got deque"
    ):
        op_grad(short)(queue)


def test_a_queue_in_a_list():
    """Whose gradient is a tuple: the queue is read as it is all the same."""

    @op_custom_gradient
    def op(pair):
        (_, a, b), c = pair
        return a * b * c, lambda u: (collections.deque([None, 7.0 * u, 11.0 * u]), 13.0 * u)

    queue = collections.deque(["static", np.array(2.0), np.array(3.0)])
    assert op_grad(op)([queue, np.array(5.0)]) == [collections.deque([None, 7.0, 11.0]), 13.0]


def test_a_queue_beside_what_names_its_leaf():
    op = op_custom_gradient(lambda queue: (queue[1] * queue[2], lambda u: (u, u * X)), name="op")
    with pytest.raises(
        ValueError, match=r"^op: the gradient of queue \(leaf 2\) must have its shape f64\[\], got"
    ):
        op_grad(op)(collections.deque(["static", np.array(2.0), np.array(3.0)]))


# --- Boxes in other functions of cgshim -----------------------------------------------------------


def test_a_box_of_known_gradients():
    found = grad(lambda p: 3.0 * op_embed_gradient(5.0, {"a": 7.0, "b": 11.0 * X}, p))(
        {"a": 2.0, "b": X}
    )
    assert found["a"] == 21.0
    np.testing.assert_allclose(found["b"], 33.0 * X)


def test_a_box_of_op_grad():
    found = grad(lambda p: op_grad(lambda p: 7.0 * p["a"] ** 2 * p["b"])(p)["a"])(
        {"a": 2.0, "b": 3.0}
    )
    assert found == {"a": 42.0, "b": 28.0}


def test_a_rule_that_returns_a_box():
    """autograd's gradient of a dict, which a second order sees as one box."""
    plain = lambda p: 7.0 * p["a"] ** 2 * p["b"]

    def f(p, mode):
        return p["a"] * p["b"], lambda p, mode, upstream: (
            grad(lambda p: upstream * plain(p))(p),
            None,
        )

    op = op_custom_gradient(f)
    assert grad(lambda p: op(p, "static"))({"a": 2.0, "b": 3.0}) == {"a": 84.0, "b": 28.0}
    assert grad(lambda p: grad(lambda p: op(p, "static"))(p)["a"])({"a": 2.0, "b": 3.0}) == {
        "a": 42.0,
        "b": 28.0,
    }


def test_a_captured_box_is_refused():
    for fn in (lambda p: op_custom_gradient(lambda x: (x * p["a"], lambda u: u))(X).sum(),
               lambda p: op_custom_gradient(lambda x: (x * p["a"], lambda u: u))(2.0)):  # fmt: skip
        with pytest.raises(CustomGradientTypeError, match="pass it as an argument"):
            grad(fn)({"a": 2.0})


def test_a_box_in_an_option_is_refused():
    op = op_custom_gradient(lambda x, *, p: (x * p["a"], lambda u: u), name="op")
    with pytest.raises(
        CustomGradientTypeError,
        match=r"^op: .*, got DictBox in the option p; pass it as an argument$",
    ):
        grad(lambda p: op(X, p=p).sum())({"a": 2.0})


def test_a_box_of_a_derivative_that_is_over_is_no_gradient():
    kept = []
    grad(lambda p: kept.append(p) or p["a"] * 1.0)({"a": 2.0})
    op = op_custom_gradient(lambda x: (x, lambda u: kept[0]), name="op")
    with pytest.raises(CustomGradientError, match=r"^op: "):
        op_grad(op)(3.0)


# --- Outputs in a tuple ---------------------------------------------------------------------------

JOINED = {
    "hstack": anp.hstack,
    "NumPy's hstack": np.hstack,
    "concatenate": anp.concatenate,
    "stack": lambda outputs: anp.ravel(anp.stack(outputs)),
    "array": lambda outputs: anp.ravel(anp.array(outputs)),
    "a box": lambda outputs: anp.concatenate([*tuple_of_boxes(outputs)]),
}
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0])


@op_custom_gradient
def two(x):
    return (2.0 * x, x * x), lambda u: 7.0 * u[0] + 11.0 * u[1] * x


two_by_hand = primitive(lambda x: (2.0 * x, x * x))
defvjp(two_by_hand, lambda ans, x: lambda u: 7.0 * u[0] + 11.0 * u[1] * x)


@pytest.mark.parametrize("join", JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("order", [1, 2])
def test_outputs_that_are_joined_again(join, order):
    """As those of a primitive, of which one box holds all."""
    fn = lambda x: anp.sum(WEIGHTS * join(two(3.0 * x)))
    by_hand = lambda x: anp.sum(WEIGHTS * anp.concatenate([*two_by_hand(3.0 * x)]))
    for _ in range(order):
        fn, by_hand = ((lambda x, fn=fn: anp.sum(grad(fn)(x) * x)) for fn in (fn, by_hand))
    np.testing.assert_allclose(grad(fn)(X), grad(by_hand)(X))


def test_outputs_in_a_box_are_what_make_vjp_takes():
    """Of a tuple it would say that it is independent of the input, as of that of any function."""
    pullback, _ = make_vjp(lambda x: tuple_of_boxes(two(x)))(X)
    np.testing.assert_allclose(pullback((X, X)), 7.0 * X + 11.0 * X * X)


def test_a_number_beside_an_output_is_static():
    op = op_custom_gradient(
        lambda x: ((2.0 * x, 3.0), lambda u: 7.0 * u[0] if u[1] is None else None)
    )
    np.testing.assert_allclose(grad(lambda x: anp.sum(op(x)[0] * op(x)[1]))(X), [21.0, 21.0])
