"""Derivatives of any function by a tape: `op_vjp` and `op_grad` use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import Tensor, is_differentiable
from cgshim_tensorflow._forward import call_in_transposition, check_linear
from cgshim_tensorflow._tensors import fitting, values_of, with_values


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor] = ()
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return fn's outputs at inputs, and its pullback to the inputs and the variables."""
    call = call_in_transposition()
    if call is not None:
        call.refuse("forward mode needs a rule that takes no derivative itself", "op_vjp in it",
                    "use reverse mode")  # fmt: skip
    values = [tf.identity(values_of(x)) for x in inputs]  # two inputs may be one object
    sources = [*values, *variables]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(sources)
        outputs = list(fn(*map(with_values, inputs, values)))

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        used = [
            (values_of(y), tf.convert_to_tensor(fitting(u, y, "op_vjp", lambda: "the output")))
            for y, u in zip(outputs, upstreams, strict=True)
            if is_differentiable(y.dtype)
        ]
        gradients = tape.gradient(
            [y for y, _ in used], sources, output_gradients=[u for _, u in used],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )  # fmt: skip
        return [
            with_values(x, tf.convert_to_tensor(g))
            for x, g in zip([*inputs, *variables], gradients, strict=True)
        ]

    return outputs, pullback


def transposed(
    fn: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    refuse: Callable[[str], NoReturn],
) -> Sequence[Tensor]:
    """Return the transpose of a linear function of tensors like the inputs, at upstreams."""
    of_values: Any = lambda *tangents: fn(*map(with_values, inputs, tangents))
    ones = [tf.ones_like(values_of(x)) for x in inputs]
    if tf.executing_eagerly():
        check_linear(of_values, ones, of_values(*ones), refuse)
    _, pullback = vjp(of_values, ones)
    return pullback(upstreams)
