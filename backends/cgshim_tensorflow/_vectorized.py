"""`tf.vectorized_map`, which rewrites the body of a loop operation by operation.

By itself it would drop custom gradients. So each operation has a converter, which makes one
operation of all iterations, whose gradient is the vectorized rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cgshim.backend import Call, CustomGradientTypeError, Mapped, Tensor, refusal
from cgshim_tensorflow._forward import Pullback, operation_in_orders, unseen
from cgshim_tensorflow._private import set_converter


def mappable_operation(
    call: Call,
    values: Sequence[Tensor],
    gradient: Pullback,
    transposable: Pullback,
    sources: Sequence[Tensor],
    keep: Callable[[list[Tensor]], None] = lambda outputs: None,
) -> tuple[list[Tensor], int]:
    """Return what `operation_in_orders` returns; a vectorized loop can map the operation."""
    outputs, orders = operation_in_orders(call.name, values, gradient, transposable, sources, keep)
    if outputs and not tf.executing_eagerly():
        of_loop = functools.partial(_over_iterations, call, gradient, outputs)
        set_converter(outputs[0].op, of_loop)
    return outputs, orders


def _over_iterations(
    call: Call, pullback: Pullback, outputs: Sequence[Tensor], pfor_input: Any
) -> list[Any]:
    """Return the outputs and sources of all iterations, by one operation."""
    pfor_input.stack_inputs()
    tensors = [x.t for x in pfor_input.inputs]
    values, sources = tensors[: len(outputs)], tensors[len(outputs) :]
    of_all = dict(zip(map(id, outputs), values, strict=True))

    def keep(attached: list[Tensor]) -> None:
        of_all.update(zip(map(id, outputs), attached, strict=True))

    def stacked(x: Tensor) -> Tensor | None:
        if id(x) in of_all:
            return of_all[id(x)]
        is_inside = hasattr(x, "graph") and pfor_input.pfor.op_is_inside_loop(x.op)
        return pfor_input.pfor.convert(x) if is_inside else None

    def over_all(*upstreams: Tensor) -> list[Tensor | None]:
        return _gradients_over_all(pullback, outputs, upstreams, stacked)

    _, orders = mappable_operation(call, values, over_all, over_all, sources, keep)
    if orders and not call.forward_mode:
        call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
    return [
        pfor_input.inputs[0]._replace(t=x, is_stacked=True) for x in [*of_all.values(), *sources]
    ]


def _gradients_over_all(
    pullback: Pullback,
    outputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    stacked: Callable[[Tensor], Tensor | None],
) -> list[Tensor | None]:
    """Return the gradients of all iterations.

    ``stacked(x)`` returns a residual for all iterations, and None if all have the same one.
    """

    def rule(*upstreams: Tensor) -> list[Tensor | None]:
        return [None if g is None else tf.convert_to_tensor(g) for g in pullback(*upstreams)]

    specs = [tf.TensorSpec(y.shape, y.dtype) for y in outputs]
    with outputs[0].graph.as_default():
        traced = tf.function(rule, autograph=False).get_concrete_function(*specs)
    every = [*map(stacked, traced.captured_inputs)]

    def of_one(rows: tuple[list[Tensor], dict[int, Tensor]]) -> list[Tensor]:
        residuals = [rows[1].get(at, x) for at, x in enumerate(traced.captured_inputs)]
        # an accumulator follows pfor's rewrite of this call, and has no rule for the call
        return _call(traced, [*map(unseen, [*rows[0], *residuals])])

    rows = list(upstreams), {at: x for at, x in enumerate(every) if x is not None}
    gradients = iter(tf.vectorized_map(of_one, rows) if traced.outputs else ())
    return [None if g is None else next(gradients) for g in traced.structured_outputs]


# --- Ops with a batching rule ---------------------------------------------------------------------


def mapped(function: Mapped, inputs: Sequence[Tensor], /) -> list[Tensor]:
    """Return the results of a function with a batching rule, for one iteration.

    In a graph it is a function of its own, which a vectorized loop calls once for all iterations.
    """
    run = lambda *xs: list(function.run(None, (), *xs)[0])
    if tf.executing_eagerly():
        return run(*inputs)  # type: ignore[no-untyped-call]
    arguments = [*map(tf.convert_to_tensor, inputs)]
    specs = [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
    traced = tf.function(run, autograph=False).get_concrete_function(*specs)
    outputs = _call(traced, [*arguments, *traced.captured_inputs])
    set_converter(outputs[0].op, functools.partial(_over_batch, function, len(arguments)))
    return outputs


def _call(traced: Any, args: Sequence[Tensor]) -> list[Tensor]:
    """Call a concrete function with its captured inputs as arguments.

    In a plain call, a tape would replace it by a function that returns more.
    """
    types = [y.dtype for y in traced.outputs]
    return list(tf.raw_ops.StatefulPartitionedCall(args=args, Tout=types, f=traced))


def _over_batch(function: Mapped, count: int, pfor_input: Any) -> list[Any]:
    """Return a function's results for all iterations, by its batching rule."""
    if any(x.is_stacked for x in pfor_input.inputs[count:]):
        raise refusal(CustomGradientTypeError, function.call.name,
                      must="f must be given every tensor of compiled code that it reads",
                      got="a captured one", do="pass it as an argument")  # fmt: skip
    pfor_input.stack_inputs(function.in_batch)
    inputs = pfor_input.inputs[:count]
    stacked = next(x.t for x in inputs if x.is_stacked)
    size = tf.shape(stacked)[0] if stacked.shape[0] is None else stacked.shape[0]
    outputs, have = function.run(size, [x.is_stacked for x in inputs], *[x.t for x in inputs])
    return [inputs[0]._replace(t=y, is_stacked=has) for y, has in zip(outputs, have, strict=True)]
