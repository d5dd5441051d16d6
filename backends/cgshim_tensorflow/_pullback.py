"""Derivatives of any function by a tape: what `op_vjp` and `op_grad` use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from cgshim.backend import Tensor, is_differentiable
from cgshim_tensorflow._fits import fit_of
from cgshim_tensorflow._forward import Linearity, no_tape_records
from cgshim_tensorflow._record import running_rule
from cgshim_tensorflow._values import values_of, with_values


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor] = ()
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return fn's outputs at inputs, and the function from upstream gradients to gradients of
    inputs and variables.
    """
    # a tensor that is two of the inputs has two gradients
    values = [tf.identity(values_of(x)) for x in inputs]
    rule = running_rule.current
    if rule:
        rule.ends.update([x._id for x in values])
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch([*values, *variables])
        outputs = list(fn(*map(with_values, inputs, values)))
    fits = [*map(fit_of, outputs)]

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        fitting: list[Any] = [
            fit.values(u, "op_vjp", lambda: "the output")
            for fit, u in zip(fits, upstreams, strict=True)
        ]
        pairs = zip(map(values_of, outputs), map(tf.convert_to_tensor, fitting), strict=True)
        used = [(value, upstream) for value, upstream in pairs if is_differentiable(value.dtype)]
        gradients = tape.gradient(
            [value for value, _ in used], [*values, *variables], output_gradients=[upstream for _, upstream in used],
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
    rule = running_rule.current
    if rule and no_tape_records():
        rule.call.refuse("forward mode calls jvp_fn, and does not transpose its transpose",
                         "a tf.function, tf.recompute_grad or tf.custom_gradient around the op",
                         "leave that out, or use reverse mode")  # fmt: skip
    of_values = lambda *tangents: fn(*map(with_values, inputs, tangents))
    linearity = Linearity()
    _, pullback = vjp(
        lambda *tangents: linearity.observe(of_values, tangents),
        [tf.ones_like(values_of(x)) for x in inputs],
    )
    if linearity.fault:
        refuse(linearity.fault)
    return pullback(upstreams)
