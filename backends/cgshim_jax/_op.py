"""An op of JAX: a `jax.custom_vjp` whose forward pass runs f and whose backward pass calls its rule.

`op` is the call. `output_in_both_modes` is the call of an op that promises forward mode, or in a
program: f's outputs, with a tangent that is a linear map with the rule as its transpose.

Both take an object whose ``run(args, needed)`` runs f for derivatives by the needed args. `EagerOp`
runs f as a Python function, and `TracedOp` as a jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.tree_util import Partial

from cgshim.backend import CustomGradientError, subvals
from cgshim_jax._linear import linear_map, transpose, with_tangents
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
    pull: Callable[[Sequence[bool], Sequence[Array], Sequence[Array]], list[Array | None]]
    """``pull(needed, residuals, upstreams)`` returns the gradients of the first args; None is zero"""
    push: Callable[[Sequence[bool], Sequence[Array], Sequence[Array | None]], list[Array]] | None
    """``push(needed, residuals, tangents)`` returns the tangents of the outputs, if there is a jvp_fn"""
    refusal: Exception | None = None
    """the error for the derivative of the gradients"""


def _outputs(f: Any, args: list[Array]) -> list[Array]:
    """Return f's outputs, for a call that nothing differentiates."""
    return f.run([*map(as_tensor, args)], [False] * len(args)).outputs  # type: ignore[no-any-return]


def _forward(f: Any, args: Any) -> tuple[list[Array], Partial]:
    args, needed = custom_vjp_primal_tree_values(args), [x.perturbed for x in args]
    outputs, operands, derivative = forward(f, args, needed)
    read = derivative.read(outputs, operands)
    types = [*map(typeof, args)], [*map(typeof, outputs)]
    return outputs, Partial(partial(derivative.gradients, needed, *types), read)


def _backward(f: Any, pull: Partial, upstreams: Sequence[Any]) -> tuple[list[Array | None]]:
    return (pull(upstreams),)


op: Any = jax.custom_vjp(_outputs, nondiff_argnums=(0,))
op.defvjp(_forward, _backward, symbolic_zeros=True)


def output_in_both_modes(f: Any, args: list[Array]) -> Any:
    """Return the output of an op whose forward mode has its own error if it is not promised.

    It is a function of the args by primitives, because JAX drops a `jax.custom_jvp` in a scan whose
    gradient is differentiated.
    """
    outputs, _, _ = forward(f, args, [*map(is_tracer, args)], f.call.forward_mode)
    return f.spec.combine(outputs)


def forward(
    f: Any, args: Any, needed: Sequence[bool], is_promised: bool = True
) -> tuple[list[Array], list[Array], Derivative]:
    """Run f for derivatives by the needed args; return the outputs, and their derivative.

    The operands of the derivative are the args and the residuals, which are constants.

    f runs on constants, so it may be opaque. The derivative of its outputs is the rule's in every
    order, and a rule may keep them. The derivative of other residuals runs f again.
    """
    args = [*map(as_tensor, args)]
    constants = [*map(fresh_constant, args)]
    may_be_needed = [flag or is_tracer(x) for flag, x in zip(needed, args, strict=True)]
    run = f.run(constants, may_be_needed)
    derivative = Derivative(f, run, constants, may_be_needed)
    operands = [*args, *run.residuals]
    outputs = with_tangents(
        partial(derivative.tangents, is_promised), run.outputs, operands,
        below=partial(derivative.tangents, True),
    )  # fmt: skip
    return outputs, operands, derivative


class Derivative:
    """The derivative of one run of f, without its tensors, because JAX keeps it in programs."""

    def __init__(self, f: Any, run: Run, args: Sequence[Array], needed: Sequence[bool]) -> None:
        self.f, self.pull, self.push, self.needed = f, run.pull, run.push, needed
        self.error = (
            error_of(f.call.refuse_second_order, "its derivative")
            if f.call.once_differentiable
            else run.refusal
        )
        index = {id(x): at for at, x in reversed([*enumerate([*args, *run.outputs])])}
        self.known = {at: index[id(x)] for at, x in enumerate(run.residuals) if id(x) in index}

    def read(self, outputs: Sequence[Array], operands: Sequence[Array]) -> list[Array]:
        """Return what the rule reads: residuals, with these outputs and args among them."""
        args = list(operands[: len(self.needed)])
        tensors, residuals = [*args, *outputs], self.connected(operands[len(args) :], args)
        read = subvals(residuals, [*self.known], [tensors[at] for at in self.known.values()])
        return read if self.error is None else [*read, *args]

    def gradients(
        self, needed: Sequence[bool], arg_types: Sequence[Any], types: Sequence[Any],
        read: Sequence[Array], upstreams: Sequence[Any],
    ) -> list[Array | None]:  # fmt: skip
        """Return the gradients of the args; an output that is not used has zeros as upstream.

        The types are those of the args and of the outputs: a shard_map that vmap maps has others.
        """
        full = [
            as_tensor(u)
            if is_differentiable(kind) and not isinstance(u, SymbolicZero)
            else zeros_of(kind)
            for u, kind in zip(upstreams, types, strict=True)
        ]
        gradients = self._forbidden(self.pull(needed, read, full), [*read, *full])
        gradients += [None] * (len(arg_types) - len(gradients))
        return [
            None if g is None else matching(g, kind)
            for g, kind in zip(gradients, arg_types, strict=False)
        ]

    def tangents(
        self, is_promised: bool, outputs: list[Array], operands: list[Array],
        dots: list[Array | None],
    ) -> Sequence[Array | None]:  # fmt: skip
        """Return the tangents of the outputs; the operands are the args and the residuals.

        They are a linear map with the rule as its transpose. Without a promise only reverse mode may
        use it.
        """
        own, dots = dots[: len(outputs)], dots[len(outputs) :][: len(self.needed)]
        moving = [at for at, t in enumerate(dots) if t is not None]
        self._check_captured(own, moving)
        if not moving:
            return [None] * len(outputs)
        arg_types = [typeof(as_tensor(x)) for x in operands[: len(dots)]]
        types = [*map(typeof, outputs)]
        floats = [at for at, kind in enumerate(types) if is_differentiable(kind)]
        float_types, none = [types[at] for at in floats], [None] * len(types)
        needed = [t is not None for t in dots]

        def pull(read: Any, upstreams: Any) -> list[Array]:
            gradients = self.gradients(
                needed, arg_types, types, read, subvals(none, floats, upstreams)
            )
            return [
                zeros_of(arg_types[at]) if gradients[at] is None else gradients[at] for at in moving
            ]

        def push(read: Any, tangents: Any) -> list[Array]:
            if not is_promised:
                self.f.call.refuse_forward_mode("jvp, jacfwd or linearize")
            if self.push is not None:
                pushed = self.push(needed, read, subvals([None] * len(needed), moving, tangents))
                pushed = [matching(pushed[at], types[at]) for at in floats]
            else:
                linear = lambda *upstreams: pull(read, upstreams)
                pushed = transpose(linear, float_types, tangents, self.f.call.refuse_nonlinear)
            return self._forbidden(pushed, [*read, *tangents])

        vectors = [matching(dots[at], arg_types[at]) for at in moving]
        read = self.read(outputs, [*map(as_tensor, operands)])  # a program may have numbers
        return subvals(none, floats, linear_map(push, pull, read, vectors, float_types))

    def _check_captured(self, own: Sequence[Array | None], moving: Sequence[int]) -> None:
        """Raise the error for a captured tensor that is differentiated and is no variable.

        f runs on constants. So its outputs have tangents of their own only if it captures a tensor
        in a place that cgshim does not search, such as a global.
        """
        if any(t is not None for t in own):
            self.f.call.refuse("an op must declare the differentiated tensors that f captures",
                               "one that cgshim does not find",
                               "write op_custom_gradient(variables=[...]), or pass it as an argument")  # fmt: skip
        for at in moving:
            if self.f.errors.get(at) is not None:
                raise self.f.errors[at]

    def _forbidden(self, tensors: Any, of: Sequence[Array]) -> list[Any]:
        if self.error is None:
            return tensors  # type: ignore[no-any-return]
        leaves, structure = jax.tree.flatten(list(tensors))
        refuse = partial(tangents_that_raise, self.error)
        forbidden = with_tangents(refuse, leaves, [*leaves, *of])
        return jax.tree.unflatten(structure, forbidden)  # type: ignore[no-any-return]

    # --- Derivatives of the residuals --------------------------------------------------------------

    def connected(self, residuals: Sequence[Array], args: list[Array]) -> Sequence[Array]:
        """Return the residuals as functions of the args."""
        made = [
            at for at, x in enumerate(residuals) if at not in self.known and is_differentiable(x)
        ]
        if not made or self.error is not None:
            return residuals
        values, tangents = (
            [residuals[at] for at in made],
            partial(self._tangents_of_residuals, made),
        )
        return subvals(residuals, made, with_tangents(tangents, values, args, is_tied=False))

    def _tangents_of_residuals(
        self, made: list[int], values: list[Array], args: list[Array], dots: list[Array | None]
    ) -> Sequence[Array | None]:
        call, dots = self.f.call, dots[len(values) :]
        moving = [at for at, t in enumerate(dots) if t is not None]
        primals, vectors = ([of[at] for at in moving] for of in (args, dots))

        def run_again(*moved: Array) -> list[Array]:
            run = self.f.run(subvals(args, moving, moved), self.needed)
            return [run.residuals[at] for at in made]

        try:
            again, tangents = jax.jvp(run_again, tuple(primals), tuple(vectors))
            if not _are_same(values, again):
                call.refuse("a second derivative runs f again, and f must return the same",
                            "other residuals",
                            "draw random numbers outside f, and pass them as an argument")  # fmt: skip
        except CustomGradientError as refusal:  # this one, or one of a function on the host
            error: Any = refusal.with_traceback(None)
        except Exception:  # noqa: BLE001  # JAX has several for an f that is opaque
            error = error_of(
                call.refuse_unconnected, values[0], "f made of values that Python read"
            )
        else:
            return tangents  # type: ignore[no-any-return]
        return tangents_that_raise(error, values, primals, vectors)


def pull_by(
    rule: Any, inputs: Sequence[Array], upstreams: Sequence[Array], variables: Sequence[Array],
    needed: Sequence[bool] | None = None,
) -> list[Array | None]:  # fmt: skip
    """Return the gradients of the inputs and the variables, conjugated as JAX has them."""
    of_inputs, of_variables = rule(
        inputs, [*map(conjugate, upstreams)], variables, rule.needed and (needed or rule.needed)
    )
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
