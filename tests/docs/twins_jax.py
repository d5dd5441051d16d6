"""Rows of docs/porting.md by hand, as a jax.custom_vjp, and with cgshim."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero, linear_call
from twins import Twins

from cgshim import op_custom_gradient, op_custom_jvp

W = jnp.array([2.0, -3.0, 5.0, 0.5])
ORDER = np.array([2, 0, 3, 1])
twins = Twins(
    {
        "`fwd`": "log1pexp",
        "residuals": "log1pexp",
        "`bwd(residuals, upstream)`": "log1pexp",
        "`nondiff_argnums`, `nondiff_argnames`": "clip_gradient",
        "`symbolic_zeros`, `.perturbed`": "product",
        "`custom_vmap`, `def_vmap`": "test_jax_rules_for_batches.py",
    }
)


@twins.add("`float0` for integers")
def _():
    @jax.custom_vjp
    def by_hand(x, order):
        return 3 * x[order]

    def backward(order, upstream):
        gradient = jnp.zeros(4).at[order].add(5 * upstream)
        return gradient, np.zeros(order.shape, jax.dtypes.float0)

    by_hand.defvjp(lambda x, order: (by_hand(x, order), order), backward)

    @op_custom_gradient
    def here(x, order):
        return 3 * x[order], lambda upstream: (jnp.zeros(4).at[order].add(5 * upstream), None)

    return [lambda x, op=op: op(x, jnp.asarray(ORDER)) ** 2 for op in (by_hand, here)]


@twins.add("`optimize_remat`", orders=1)
def _():
    @jax.custom_vjp
    def by_hand(x):
        return jnp.sin(x)

    forward = lambda x: (jnp.sin(x), x)
    by_hand.defvjp(forward, lambda x, u: (5 * u * jnp.cos(x),), optimize_remat=True)
    here = op_custom_gradient(lambda x: (jnp.sin(x), lambda u: 5 * u * jnp.cos(x)))
    return by_hand, here


@twins.add("`jax.closure_convert`", W)
def _():
    @jax.custom_vjp
    def converted(x, *constants):
        return jnp.sin(x * constants[0])

    def backward(kept, upstream):
        return jax.vjp(lambda x, w: jnp.sin(x * w), *kept)[1](5 * upstream)

    converted.defvjp(lambda x, w: (converted(x, w), (x, w)), backward)

    def by_hand(x, w):
        _, constants = jax.closure_convert(lambda x: jnp.sin(x * w), x)
        return converted(x, *constants)

    def variables(x, w):
        @op_custom_gradient(variables=[w])
        def op(x):
            def grad(upstream, variables):
                grad_x, grad_w = backward((x, *variables), upstream)
                return grad_x, [grad_w]

            return jnp.sin(x * w), grad

        return op(x)

    @op_custom_gradient
    def argument(x, w):
        return jnp.sin(x * w), lambda upstream: backward((x, w), upstream)

    return by_hand, argument, variables


@twins.add("`jax.custom_gradient`", orders=1)  # by hand the next order is autodiff's
def _():
    def flat(x):
        return (x * x, 3 * x), lambda square, triple: 5 * square * x + 7 * triple

    def pytree(x):
        outputs, grad = flat(x)
        return outputs, lambda upstream: grad(*upstream)

    ops = jax.custom_gradient(pytree), op_custom_gradient(flat), op_custom_gradient(pytree)
    return [lambda x, op=op: op(x)[0] * op(x)[1] for op in ops]


@twins.add("`jax.custom_jvp`, `defjvp`, `defjvps`", W)
def _():
    by_hand = jax.custom_jvp(lambda x, w: x * w)
    by_hand.defjvps(lambda dx, y, x, w: 5 * dx * w, lambda dw, y, x, w: 7 * dw * x)
    here = op_custom_jvp(lambda x, w: (x * w, lambda dx, dw: 5 * dx * w + 7 * dw * x))
    return by_hand, here


@twins.add("`custom_jvp` with `symbolic_zeros`")
def _():
    by_hand = jax.custom_jvp(lambda x, w: x * w)

    def tangent(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        assert type(dw) is SymbolicZero
        return x * w, 5 * dx * w

    by_hand.defjvp(tangent, symbolic_zeros=True)

    @op_custom_jvp
    def here(x, w):
        def jvp(dx, dw, needs_input_grad):
            assert needs_input_grad == (True, False)
            return 5 * dx * w

        return x * w, jvp

    return lambda x: by_hand(x, W), lambda x: here(x, W)


@twins.add("`linear_call`, `custom_linear_solve`")
def _():
    def by_hand(x):
        return linear_call(lambda w, x: w * x, lambda w, upstream: 5 * w * upstream, W, x)

    def solve(x):
        inverse = lambda _, x: x * W
        return jax.lax.custom_linear_solve(lambda x: x / W, x, inverse, lambda _, u: 5 * u * W)

    here = op_custom_gradient(lambda x: (W * x, lambda upstream: 5 * W * upstream))
    return by_hand, solve, here


@twins.add("`sequential_vmap`", orders=0)
def _():
    by_hand = sequential_vmap(lambda x: x**3)

    def one_by_one(size, in_batched, x):
        return jax.lax.map(lambda x: x**3, x), lambda upstream: 5 * upstream * x**2, True

    here = op_custom_gradient(lambda x: (x**3, lambda u: 5 * u * x**2), vmap=one_by_one)
    return jax.vmap(by_hand), jax.vmap(here)


@twins.add("`equinox.filter_custom_vjp`", W)
def _():
    import equinox

    @equinox.filter_custom_vjp
    def filtered(vjp_arg, name):
        x, w = vjp_arg
        return getattr(jnp, name)(x * w)

    @filtered.def_fwd
    def _(perturbed, vjp_arg, name):
        assert perturbed == (True, True)
        return filtered(vjp_arg, name), None

    @filtered.def_bwd
    def _(residuals, upstream, perturbed, vjp_arg, name):
        x, w = vjp_arg
        return 5 * upstream * w, 7 * upstream * x

    @op_custom_gradient
    def here(x, w, name):
        def grad(upstream, needs_input_grad):
            assert needs_input_grad == (True, True, None)
            return 5 * upstream * w, 7 * upstream * x, None

        return getattr(jnp, name)(x * w), grad

    return lambda x, w: filtered((x, w), "sin"), lambda x, w: here(x, w, "sin")
