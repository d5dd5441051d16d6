"""An op of JAX: a `jax.custom_vjp` whose forward pass runs f and whose backward pass calls its rule.

`op` is the call. `op_in_both_modes` is the call of an op that promises forward mode: a
`jax.custom_jvp` whose tangent is a linear map with the rule as its transpose.

Both take an object with two methods: ``outputs(args)`` for a call that nothing differentiates, and
``run(args, needed)`` for a call that is differentiated. `EagerOp` runs f as a Python function, and
`TracedOp` as a jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from cgshim.backend import Call, refuse_captured_tangent, subvals
from cgshim_jax._linear import in_batch_of, linear_map, transpose
from cgshim_jax._tensors import (
    Array,
    as_tensor,
    is_differentiable,
    is_tracer,
    matching,
    typeof,
    zeros_of,
)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["outputs", "residuals"],
    meta_fields=["rule", "needed"],
)
@dataclass
class Run:
    """The tensors and the rule of one run of f."""

    outputs: list[Array]
    residuals: list[Array]
    """the tensors that the rule reads"""
    rule: Any
    """``rule(residuals, upstreams)`` returns one gradient or None for each of the args. ``rule.known``
    maps the indices of residuals that are outputs or args to indices of ``[*outputs, *args]``.
    ``rule.refusal`` is the error for the derivative of its gradients, or None.
    """
    needed: tuple[bool, ...] | None = None
    """the args whose gradients the rule returns; None for all"""


def _outputs(f: Any, args: list[Array], run: Run | None) -> list[Array]:
    """Return f's outputs at args; run is a run at args that has been made, or None."""
    if run is not None:
        return run.outputs
    outputs = f.outputs(args)
    return in_batch_of(args, outputs) if f.is_traced else outputs


def _forward(f: Any, args: Any, run: Any) -> tuple[list[Array], Saved]:
    needed = [x.perturbed for x in args]
    return forward(f, *custom_vjp_primal_tree_values((args, run)), needed)  # type: ignore[call-arg]


def _backward(f: Any, saved: Saved, upstreams: Sequence[Any]) -> tuple[list[Array | None], None]:
    return saved.gradients(saved.tensors, upstreams), None


op: Any = jax.custom_vjp(_outputs, nondiff_argnums=(0,))
op.defvjp(_forward, _backward, symbolic_zeros=True)


def _op(f: Any, args: list[Array], run: Run | None) -> list[Array]:
    """Return the outputs of an op that is differentiable in both modes.

    JAX forgets a custom_jvp in a scan whose gradient is differentiated again: there it finds `op`.
    """
    return op(f, args, run)  # type: ignore[no-any-return]


def _derivative(f: Any, primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
    (args, run), (dots, _) = primals, tangents
    moving = [at for at, t in enumerate(dots) if not isinstance(t, SymbolicZero)]
    outputs, saved = forward(f, args, run, [at in moving for at in range(len(args))])
    floats = [at for at, y in enumerate(outputs) if is_differentiable(y)]
    types = [saved.types[at] for at in floats]
    no_floats = (None if at in floats else y.shape for at, y in enumerate(outputs))
    zeros = [None if shape is None else np.zeros(shape, jax.dtypes.float0) for shape in no_floats]
    is_promised, none = run is not None or f.call.forward_mode, [None] * len(args)
    tensors, saved.tensors = saved.tensors, []  # JAX keeps the two functions, so they keep none

    def pull(read: Any, upstreams: Any) -> list[Array]:
        gradients = saved.gradients(read, subvals(zeros, floats, upstreams))
        kinds = saved.arg_types
        return [zeros_of(kinds[at]) if gradients[at] is None else gradients[at] for at in moving]

    def push(read: Any, tangents: Any) -> list[Array]:
        if not is_promised:
            f.call.refuse_forward_mode("jvp, jacfwd or linearize")
        if saved.rule.has_jvp:
            if any(at >= len(saved.rule.input_types) for at in moving):
                refuse_captured_tangent(f.call.name)
            every = saved.rule.push(read, subvals(none, moving, tangents))
            pushed = [matching(every[at], saved.types[at]) for at in floats]
        else:
            linear = lambda *upstreams: pull(read, upstreams)
            pushed = transpose(linear, types, tangents, f.call.refuse_nonlinear)
        if saved.rule.refusal is None:
            return pushed
        return forbid_derivative(pushed, [*read, *tangents], saved.rule.refusal)

    pushed = linear_map(push, pull, tensors, [dots[at] for at in moving], types)
    return outputs, subvals(zeros, floats, pushed)


op_in_both_modes: Any = jax.custom_jvp(_op, nondiff_argnums=(0,))
op_in_both_modes.defjvp(_derivative, symbolic_zeros=True)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tensors"],
    meta_fields=["rule", "arg_types", "types"],
)
@dataclass
class Saved:
    """The tensors that the backward pass reads, and the types of args and outputs."""

    tensors: list[Array]
    rule: Any
    arg_types: tuple[Any, ...]
    types: tuple[Any, ...]

    def gradients(self, read: Sequence[Array], upstreams: Sequence[Any]) -> list[Array | None]:
        """Return the gradients of the args; an output that is not used has zeros as upstream."""
        full = [
            as_tensor(u)
            if is_differentiable(kind) and not isinstance(u, SymbolicZero)
            else zeros_of(kind)
            for u, kind in zip(upstreams, self.types, strict=True)
        ]
        gradients = self.rule(read, full)
        if self.rule.refusal is not None:
            gradients = forbid_derivative(gradients, [*read, *full], self.rule.refusal)
        return [
            None if g is None else matching(g, kind)
            for g, kind in zip(gradients, self.arg_types, strict=True)
        ]


def forward(
    f: Any, args: Any, run: Run | None, needed: Sequence[bool]
) -> tuple[list[Array], Saved]:
    """Run f for derivatives by the needed args; return the outputs and what the rule reads.

    The outputs are outputs of the op again. So further derivatives of them are the rule's in every
    order, f may be opaque, and a rule may keep them.
    """
    args = [*map(as_tensor, args)]
    f.check_captured(needed)
    fits = run is not None and run.needed in (None, tuple(needed))
    made: Run = run if fits else f.run(args, needed)  # type: ignore[assignment]
    outputs = made.outputs
    if any(map(is_tracer, args)):
        if not fits:
            made.outputs = in_batch_of(args, outputs)
        outputs = op_in_both_modes(f, args, made)
    known = [*outputs, *args]
    read = subvals(
        made.residuals, [*made.rule.known], [known[at] for at in made.rule.known.values()]
    )
    if made.rule.refusal is not None:
        read += args
    types = tuple(map(typeof, args)), tuple(map(typeof, outputs))
    return outputs, Saved(read, made.rule, *types)


def known_tensors(
    residuals: Sequence[Array], args: Sequence[Array], outputs: Sequence[Array]
) -> dict[int, int]:
    """Return ``rule.known``; an output that is one of the args is that."""
    index = {id(y): at for at, y in reversed([*enumerate(outputs)])}
    index |= {id(x): len(outputs) + at for at, x in enumerate(args)}
    return {at: index[id(x)] for at, x in enumerate(residuals) if id(x) in index}


# --- Derivatives that raise an error --------------------------------------------------------------


def forbid_derivative(
    tensors: Sequence[Array | None], of: Sequence[Array], error: Exception
) -> list[Any]:
    """Return the tensors, as functions of other tensors whose derivative raises the error."""

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def constants(tensors: list[Array], of: list[Array]) -> list[Array]:
        return tensors

    @constants.defjvp  # type: ignore[untyped-decorator]
    def _(primals: Any, tangents: Any) -> Any:
        leaves, structure = jax.tree.flatten(primals[0])
        moving = [t for t in jax.tree.leaves(tangents) if t.dtype != jax.dtypes.float0]
        forbidden = linear_map(refuse, refuse, [], moving, [*map(typeof, leaves)])
        return primals[0], jax.tree.unflatten(structure, forbidden)

    def refuse(*_: Any) -> NoReturn:
        raise error

    return constants(list(tensors), [x for x in of if is_differentiable(x)])  # type: ignore[no-any-return]


def error_of(function: Callable[..., Any], *args: Any) -> Exception:
    """Return the error that a function raises for these arguments."""
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(None)
    raise AssertionError


def once_differentiable_error(call: Call) -> Exception | None:
    """Return the error for the derivative of a gradient that is once_differentiable."""
    return (
        error_of(call.refuse_second_order, "its derivative") if call.once_differentiable else None
    )


def push_by(
    rule: Any, tangents: Sequence[Array | None], inputs: Sequence[Any], outputs: Sequence[Any]
) -> list[Array]:
    """Return the tangents of outputs like these, by the author's jvp_fn."""
    pushed = rule.tangents(tangents, outputs, lambda at: zeros_of(inputs[at]))
    return [zeros_of(y) if t is None else t for t, y in zip(pushed, outputs, strict=True)]
