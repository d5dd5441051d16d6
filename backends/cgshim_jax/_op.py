"""An op of JAX: a `jax.custom_vjp` whose forward pass runs f and whose backward pass calls its rule.

`op` is the call. `op_in_both_modes` is the call of an op that promises forward mode, or in a program:
a `jax.custom_jvp` around it, whose tangent is a linear map with the rule as its transpose.

Both take an object whose ``run(args, needed)`` runs f for derivatives by the needed args. `EagerOp`
runs f as a Python function, and `TracedOp` as a jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.tree_util import Partial

from cgshim.backend import CustomGradientError, subvals
from cgshim_jax._linear import linear_map, transpose, with_tangents, without_tangents
from cgshim_jax._tensors import (
    Array,
    as_tensor,
    conjugate,
    fresh_constant,
    is_differentiable,
    is_tracer,
    matching,
    typeof,
    zeros_of,
)


@dataclass
class Run:
    """The tensors and the rule of one run of f."""

    outputs: list[Array]
    residuals: list[Array]
    """the tensors that the rule reads"""
    pull: Callable[[Sequence[Array], Sequence[Array]], list[Array | None]]
    """``pull(residuals, upstreams)`` returns the gradients of the args; None is zero"""
    push: Callable[[Sequence[Array], Sequence[Array | None]], list[Array]] | None
    """``push(residuals, tangents)`` returns the tangents of the outputs, if there is a jvp_fn"""
    refusal: Exception | None = None
    """the error for the derivative of the gradients"""
    needed: Sequence[bool] | None = None
    """the args whose gradients the rule returns; None for all"""


def _outputs(f: Any, args: list[Array]) -> list[Array]:
    """Return f's outputs, for a call that nothing differentiates."""
    run = f.run([*map(as_tensor, args)], [False] * len(args))
    return with_tangents(without_tangents, run.outputs, args)


def _forward(f: Any, args: Any) -> tuple[list[Array], Partial]:
    needed = [x.perturbed for x in args]
    outputs, read, derivative = forward(f, custom_vjp_primal_tree_values(args), needed)
    return outputs, Partial(derivative.gradients, read)


def _backward(f: Any, pull: Partial, upstreams: Sequence[Any]) -> tuple[list[Array | None]]:
    return (pull(upstreams),)


op: Any = jax.custom_vjp(_outputs, nondiff_argnums=(0,))
op.defvjp(_forward, _backward, symbolic_zeros=True)


def _jvp(f: Any, primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
    dots = [None if isinstance(t, SymbolicZero) else t for t in tangents[0]]
    outputs, read, derivative = forward(f, primals[0], [t is not None for t in dots])
    pushed = derivative.tangents(read, dots, f.call.forward_mode)
    pairs = zip(pushed, derivative.types, strict=True)
    return outputs, [
        np.zeros(kind.shape, jax.dtypes.float0) if t is None else t for t, kind in pairs
    ]


# JAX drops a custom_jvp in a scan whose gradient is differentiated: there it finds `op`
op_in_both_modes: Any = jax.custom_jvp(op, nondiff_argnums=(0,))
op_in_both_modes.defjvp(_jvp, symbolic_zeros=True)


def forward(
    f: Any, args: Any, needed: Sequence[bool]
) -> tuple[list[Array], list[Array], Derivative]:
    """Run f for derivatives by the needed args; return the outputs, what the rule reads, and it.

    f runs on constants, so it may be opaque. The derivative of its outputs is the rule's in every
    order, and a rule may keep them. The derivative of other residuals runs f again.
    """
    f.check_captured(needed)
    args = [*map(as_tensor, args)]
    constants = [*map(fresh_constant, args)]
    run = f.run(constants, needed)
    derivative = Derivative(f, run, constants, needed)
    residuals = derivative.connected(run.residuals, args)
    tangents = derivative.tangents_of_outputs
    outputs = with_tangents(tangents, run.outputs, [*args, *residuals])
    return outputs, derivative.read(outputs, args, residuals), derivative


class Derivative:
    """The derivative of one run of f, without its tensors, because JAX keeps it in programs."""

    def __init__(self, f: Any, run: Run, args: Sequence[Array], needed: Sequence[bool]) -> None:
        self.f, self.pull, self.push, self.needed = f, run.pull, run.push, list(needed)
        self.is_for_all = run.needed is None
        self.set_types(args, run.outputs)
        self.error = run.refusal
        if f.call.once_differentiable:
            self.error = error_of(f.call.refuse_second_order, "its derivative")
        index = {id(y): at for at, y in reversed([*enumerate(run.outputs)])}
        index |= {id(x): len(run.outputs) + at for at, x in enumerate(args)}
        self.known = {at: index[id(x)] for at, x in enumerate(run.residuals) if id(x) in index}

    def set_types(self, args: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Set the types of args and outputs: a shard_map that vmap maps has other types."""
        self.arg_types, self.types = [*map(typeof, args)], [*map(typeof, outputs)]

    def read(
        self, outputs: Sequence[Array], args: Sequence[Array], residuals: Sequence[Array]
    ) -> list[Array]:
        """Return what the rule reads: residuals, with these outputs and args among them."""
        tensors = [*outputs, *args]
        known = [tensors[index] for index in self.known.values()]
        read = subvals(residuals, [*self.known], known)
        return read if self.error is None else [*read, *args]

    def gradients(self, read: Sequence[Array], upstreams: Sequence[Any]) -> list[Array | None]:
        """Return the gradients of the args; an output that is not used has zeros as upstream."""
        full = [
            as_tensor(u)
            if is_differentiable(kind) and not isinstance(u, SymbolicZero)
            else zeros_of(kind)
            for u, kind in zip(upstreams, self.types, strict=True)
        ]
        gradients = self._forbidden(self.pull(read, full), [*read, *full])
        return [
            None if g is None else matching(g, kind)
            for g, kind in zip(gradients, self.arg_types, strict=False)
        ]

    def tangents(
        self, read: Sequence[Array], dots: Sequence[Array | None], is_promised: bool = True
    ) -> Sequence[Array | None]:
        """Return the tangents of the outputs, a linear map with the rule as its transpose.

        Without a promise only reverse mode may use it.
        """
        moving = [at for at, t in enumerate(dots) if t is not None]
        floats = [at for at, kind in enumerate(self.types) if is_differentiable(kind)]
        types, none = [self.types[at] for at in floats], [None] * len(self.types)
        no_dots = [None] * len(dots)

        def pull(read: Any, upstreams: Any) -> list[Array]:
            gradients = self.gradients(read, subvals(none, floats, upstreams))
            full = [
                zeros_of(k) if g is None else g
                for g, k in zip(gradients, self.arg_types, strict=True)
            ]
            return [full[at] for at in moving]

        def push(read: Any, tangents: Any) -> list[Array]:
            if not is_promised:
                self.f.call.refuse_forward_mode("jvp, jacfwd or linearize")
            if self.push is not None:
                pushed = self.push(read, subvals(no_dots, moving, tangents))
                pushed = [matching(pushed[at], self.types[at]) for at in floats]
            else:
                linear = lambda *upstreams: pull(read, upstreams)
                pushed = transpose(linear, types, tangents, self.f.call.refuse_nonlinear)
            return self._forbidden(pushed, [*read, *tangents])

        vectors = [matching(dots[at], self.arg_types[at]) for at in moving]
        return subvals(none, floats, linear_map(push, pull, read, vectors, types))

    def _forbidden(self, tensors: Any, of: Sequence[Array]) -> list[Any]:
        if self.error is None:
            return tensors  # type: ignore[no-any-return]
        leaves, structure = jax.tree.flatten(list(tensors))
        refuse = partial(tangents_that_raise, self.error)
        forbidden = with_tangents(refuse, leaves, [*leaves, *of])
        return jax.tree.unflatten(structure, forbidden)  # type: ignore[no-any-return]

    # --- Derivatives of the outputs and the residuals ---------------------------------------------

    def tangents_of_outputs(
        self, outputs: list[Array], operands: list[Array], dots: list[Array | None]
    ) -> Sequence[Array | None]:
        """Return the tangents of the outputs; the operands are the args and the residuals."""
        end = len(self.arg_types)
        args, residuals, dots = operands[:end], operands[end:], dots[:end]
        needed = [t is not None for t in dots]
        if not any(needed):
            return without_tangents(outputs)
        self.f.check_captured(needed)
        if self.is_for_all or needed == self.needed:
            derivative = copy(self)
            derivative.set_types(args, outputs)
            return derivative.tangents(self.read(outputs, args, residuals), dots)
        _, read, derivative = forward(self.f, args, needed)
        return derivative.tangents(read, dots)

    def connected(self, residuals: list[Array], args: list[Array]) -> list[Array]:
        """Return the residuals as functions of the args."""
        made = [
            at for at, x in enumerate(residuals) if at not in self.known and is_differentiable(x)
        ]
        if not made or self.error is not None:
            return residuals
        values = [residuals[at] for at in made]
        tangents = partial(self._tangents_of_residuals, made)
        return subvals(residuals, made, with_tangents(tangents, values, args, is_tied=False))

    def _tangents_of_residuals(
        self, made: list[int], values: list[Array], args: list[Array], dots: list[Array | None]
    ) -> Sequence[Array | None]:
        call, moving = self.f.call, [at for at, t in enumerate(dots) if t is not None]
        primals, vectors = ([of[at] for at in moving] for of in (args, dots))

        def run_again(*moved: Array) -> list[Array]:
            run = self.f.run(subvals(args, moving, moved), self.needed)
            return [run.residuals[at] for at in made]

        try:
            again, tangents = jax.jvp(run_again, tuple(primals), tuple(vectors))
        except CustomGradientError as error:  # a function on the host
            return tangents_that_raise(error.with_traceback(None), values, primals, vectors)
        except Exception:  # noqa: BLE001  # JAX has several for an f that is opaque
            why = values[0], "f made of values that Python read"
            refusal = error_of(call.refuse_unconnected, *why)
            return tangents_that_raise(refusal, values, primals, vectors)
        if not _are_same(values, again):
            refusal = error_of(call.refuse, *_OTHER_RESIDUALS)
            return tangents_that_raise(refusal, values, primals, vectors)
        return tangents  # type: ignore[no-any-return]


def pull_by(
    rule: Any, inputs: Sequence[Array], upstreams: Sequence[Array], variables: Sequence[Array]
) -> list[Array | None]:
    """Return the gradients of the inputs and the variables, conjugated as JAX has them."""
    of_inputs, of_variables = rule(inputs, [*map(conjugate, upstreams)], variables, rule.needed)
    return [None if g is None else conjugate(g) for g in (*of_inputs, *of_variables)]


def push_by(
    rule: Any, tangents: Sequence[Array | None], inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[Array]:
    """Return the tangents of outputs like these, by the author's jvp_fn."""
    pushed = rule.tangents(tangents, outputs, lambda at: zeros_of(inputs[at]))
    return [zeros_of(y) if t is None else t for t, y in zip(pushed, outputs, strict=True)]


# --- Derivatives that raise an error --------------------------------------------------------------


def tangents_that_raise(
    error: Exception | None, values: Sequence[Array], _: Any, dots: Sequence[Array | None]
) -> list[Array]:
    """Return tangents of the values that raise the error when they are used."""

    def refuse(*_: Any) -> NoReturn:
        raise error  # type: ignore[misc]

    moving = [t for t in dots if t is not None]
    return linear_map(refuse, refuse, [], moving, [*map(typeof, values)])


_OTHER_RESIDUALS = (
    "a second derivative runs f again, and f must return the same",
    "other residuals",
    "draw random numbers outside f, and pass them as an argument",
)


def _are_same(values: Sequence[Array], others: Sequence[Array]) -> bool:
    """Return True if two runs of f made the same numbers, or numbers that are not known yet."""
    pairs = [(jnp.max(jnp.abs(x), initial=0), jnp.max(jnp.abs(x - y), initial=0))
             for x, y in zip(values, others, strict=True)]  # fmt: skip
    return all(is_tracer(change) or not change > 1e-2 * size for size, change in pairs)


def error_of(function: Callable[..., Any], *args: Any) -> Exception | None:
    """Return the error that a function raises for these arguments, or None."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(None)
    return None
