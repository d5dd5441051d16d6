"""Derivatives of any function by a tape: what `op_vjp` and `op_grad` use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cgshim_tensorflow._fits import fit_of, fit_of_dense
from cgshim_tensorflow._origins import Differentiated
from cgshim_tensorflow._values import is_differentiable, values_of, with_values

Tensor = Any


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return fn's outputs at inputs, and the function from upstream gradients to gradients of inputs."""
    return vjp_with_variables(fn, inputs, ())


def vjp_with_variables(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], variables: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Return the same for a function that reads variables, whose gradients follow those of the inputs."""
    values = [tf.identity(values_of(x)) for x in inputs]  # a tensor that is given twice has two gradients
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape, Differentiated(values):
        tape.watch([*values, *variables])
        outputs = list(fn(*map(with_values, inputs, values)))
    fits = [fit_of(output) or fit_of_dense(output.shape, output.dtype) for output in outputs]

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        fitting: list[Any] = [
            fit.values(u, "op_vjp", lambda: "the output") for fit, u in zip(fits, upstreams, strict=True)
        ]
        pairs = zip(map(values_of, outputs), map(tf.convert_to_tensor, fitting), strict=True)
        used = [(value, upstream) for value, upstream in pairs if is_differentiable(value)]
        gradients = tape.gradient(
            [value for value, _ in used], [*values, *variables], output_gradients=[upstream for _, upstream in used],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )  # fmt: skip
        return [with_values(x, tf.convert_to_tensor(g)) for x, g in zip([*inputs, *variables], gradients, strict=True)]

    return outputs, pullback
