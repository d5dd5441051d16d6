"""A rule under `tf.vectorized_map`: the gradient of all iterations is the rule, vectorized in its turn.

`pfor` rewrites the operations of a loop's body one by one. Of an operation with a gradient of its own it would keep the
values alone, and so take autodiff's gradient; here the rule's own operations go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from _cgshim_tensorflow_forward import Backward, graph_of
from tensorflow.python.eager.record import stop_recording
from tensorflow.python.ops.parallel_for.pfor import wrap

Tensor = Any


def converter(count: int, backward: Backward, attach: Callable[..., list[Tensor]]) -> Callable[[Any], list[Any]]:
    """What pfor calls to vectorize an operation on `count` values, then sources, with the gradient backward."""

    def convert(pfor_input: Any) -> list[Any]:
        rule = _Traced(backward, pfor_input.op.inputs[:count])
        residuals = [_converted(pfor_input.pfor, tensor) for tensor in rule.residuals]
        pfor_input.stack_inputs()
        inputs = [wrapped.t for wrapped in pfor_input.inputs]
        values, sources = inputs[:count], inputs[count:]
        outputs = attach(sources, values, _vectorized(rule, values, residuals))
        return [wrap(tensor) for tensor in [*outputs, *sources]]

    return convert


class _Traced:
    """A rule as a function of tensors alone: its upstream gradients, and the residuals that it closes over."""

    def __init__(self, backward: Backward, values: Sequence[Tensor]) -> None:
        self._present: list[bool] = []

        def of_sources(*upstreams: Tensor) -> list[Tensor]:
            gradients = backward(*upstreams)
            self._present = [gradient is not None for gradient in gradients]
            return [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

        with graph_of(values[0]):
            specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
            self._function = tf.function(of_sources, autograph=False).get_concrete_function(*specs)
        self.residuals = self._function.captured_inputs

    def __call__(self, upstreams: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
        types = [output.dtype for output in self._function.outputs]
        with stop_recording():  # only what pfor makes of it is ever run, and differentiated
            return list(tf.raw_ops.StatefulPartitionedCall(args=[*upstreams, *residuals], Tout=types, f=self._function))

    @property
    def gives_any(self) -> bool:
        return any(self._present)

    def fill(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """One gradient a source again, None where the rule returned none."""
        given = iter(gradients)
        return [next(given) if present else None for present in self._present]


def _converted(pfor: Any, residual: Tensor) -> tuple[Tensor, bool]:
    """A residual for all iterations, and whether it differs between them."""
    if isinstance(residual, tf.__internal__.EagerTensor):
        return residual, False
    wrapped = pfor._convert_helper(residual)
    return wrapped.t, wrapped.is_stacked


def _vectorized(rule: _Traced, values: Sequence[Tensor], residuals: Sequence[tuple[Tensor, bool]]) -> Backward:
    def of_one(elements: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        upstreams, stacked = elements[0], iter(elements[1])
        return rule(upstreams, [next(stacked) if is_stacked else tensor for tensor, is_stacked in residuals])

    def backward(*upstreams: Tensor | None) -> list[Tensor | None]:
        given = [
            tf.zeros_like(value) if upstream is None else tf.convert_to_tensor(upstream)
            for upstream, value in zip(upstreams, values, strict=True)
        ]
        stacked = [tensor for tensor, is_stacked in residuals if is_stacked]
        return rule.fill(tf.vectorized_map(of_one, (given, stacked)) if rule.gives_any else [])

    return backward
