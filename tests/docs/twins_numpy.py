"""Rows of docs/porting.md by hand, as a primitive of autograd, and with cgshim."""

import autograd.numpy as np
from autograd import make_jvp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import defjvp, defvjp, defvjp_argnums, notrace_primitive, primitive
from autograd.misc import const_graph
from autograd.numpy.numpy_vjps import unbroadcast_f
from twins import Twins

from cgshim import op_custom_gradient, op_custom_jvp, op_stop_gradient, op_sum_to_shape

W = np.array([2.0, -3.0, 5.0, 0.5])
twins = Twins(
    {
        "`@primitive`": "scaled_square",
        "`defvjp(f, lambda ans, x: lambda g: ...)`": "scaled_square",
        "a tuple of outputs in one `SequenceBox`": "test_containers.py",
    }
)


@twins.add("`argnums=`")
def _():
    by_hand = primitive(lambda x, w: x * w)
    defvjp(by_hand, lambda ans, x, w: lambda g: 5 * g * w * x, argnums=[0])
    here = op_custom_gradient(lambda x, w: (x * w, lambda upstream: (5 * upstream * w * x, None)))
    return lambda x: by_hand(x, W), lambda x: here(x, W)


@twins.add("`defvjp_argnums`")
def _():
    by_hand = primitive(lambda x, w: x * w)

    def gradients(argnums, ans, args, kwargs):
        assert argnums == (0,)
        return lambda g: (5 * g * args[1] * args[0],)

    defvjp_argnums(by_hand, gradients)

    @op_custom_gradient
    def here(x, w):
        def grad(upstream, needs_input_grad):
            assert needs_input_grad == (True, False)
            return 5 * upstream * w * x, None

        return x * w, grad

    return lambda x: by_hand(x, W), lambda x: here(x, W)


@twins.add("`defjvp(f, lambda g, ans, x: ...)`", orders=0)
def _():
    by_hand = primitive(lambda x: x**3)
    defjvp(by_hand, lambda g, ans, x: 5 * g * x**2)
    tangent = lambda x: lambda dx: 5 * dx * x**2
    pair = op_custom_jvp(lambda x: (x**3, tangent(x)))
    triple = op_custom_gradient(lambda x: (x**3, tangent(x), tangent(x)), forward_mode=True)
    return [lambda x, op=op: np.stack(make_jvp(op)(x)(W)) for op in (by_hand, pair, triple)]


@twins.add("`notrace_primitive`")
def _():
    rounded = notrace_primitive(np.round)
    return lambda x: x**3 * rounded(x), lambda x: x**3 * op_stop_gradient(np.round(x))


@twins.add("`unbroadcast_f`", [2.5])
def _():
    by_hand = primitive(lambda x, w: x * w)
    defvjp(
        by_hand,
        lambda ans, x, w: lambda g: 5 * g * w,
        lambda ans, x, w: unbroadcast_f(w, lambda g: 7 * g * x),
    )

    @op_custom_gradient
    def here(x, w):
        def grad(upstream):
            return 5 * upstream * w, op_sum_to_shape(7 * upstream * x, w)

        return x * w, grad

    return by_hand, here


@twins.add("`SequenceBox`, `DictBox` as an argument")
def _():
    by_hand = primitive(lambda pair: pair[0] * pair[1])

    def gradient(ans, pair):
        return lambda g: tuple_of_boxes((5 * g * pair[1], 7 * g * pair[0]))

    defvjp(by_hand, gradient)
    product = lambda pair: (pair[0] * pair[1], lambda u: ((5 * u * pair[1], 7 * u * pair[0]),))
    ops = by_hand, op_custom_gradient(product)
    return [lambda x, op=op: op(tuple_of_boxes((x, x**2))) for op in ops]


@twins.add("`const_graph` of a function")
def _():
    by_hand = primitive(lambda x: x**3)
    defvjp(by_hand, lambda ans, x: lambda g: 5 * g * x**2)
    here = op_custom_gradient(lambda x: (x**3, lambda upstream: 5 * upstream * x**2))
    return const_graph(by_hand), here
