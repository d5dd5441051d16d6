"""A rule under `tf.vectorized_map`: the gradient of all iterations is the rule, vectorized in its turn.

`pfor` rewrites the operations of a loop's body one by one. Of an operation with a gradient of its own it would keep the
values alone, and so take autodiff's gradient; here the rule's own operations go with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager.record import stop_recording
from tensorflow.python.ops.parallel_for.pfor import wrap

from cgshim_tensorflow._forward import Backward, graph_of, judge, of_graph, transposition

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any


def converter(
    count: int, backward: Backward, attach: Callable[..., list[Tensor]], call: Call
) -> Callable[[Any], list[Any]]:
    """What pfor calls to vectorize an operation on `count` values, then sources, with the gradient backward."""

    def convert(pfor_input: Any) -> list[Any]:
        own = list(pfor_input.op.outputs[:count])
        rule = _Traced(backward, own)
        residuals = [_converted(pfor_input.pfor, tensor, own) for tensor in rule.residuals]
        pfor_input.stack_inputs()
        inputs = [wrapped.t for wrapped in pfor_input.inputs]
        values, sources = inputs[:count], inputs[count:]

        def around(outputs: Sequence[Tensor]) -> Backward:
            return _vectorized(rule, outputs, residuals, call)

        def forward(transpose: Callable[[], None]) -> None:
            rule.judge(call)
            transpose()

        outputs = attach(sources, values, around, forward)
        return [wrap(tensor) for tensor in [*outputs, *sources]]

    return convert


class _Traced:
    """A rule as a function of tensors alone: its upstream gradients, and the residuals that it closes over."""

    def __init__(self, backward: Backward, values: Sequence[Tensor]) -> None:
        self._present: list[bool] = []
        self._values = values
        self._error: Exception | None = None
        self.residuals: list[Tensor] = []

        def of_sources(*upstreams: Tensor) -> list[Tensor]:
            gradients = backward(*upstreams)
            self._present = [gradient is not None for gradient in gradients]
            return [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

        try:
            with graph_of(values[0]):
                specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
                self._function = tf.function(of_sources, autograph=False).get_concrete_function(*specs)
        except Exception as error:  # noqa: BLE001  # the author's: raised again for whoever asks for a gradient
            self._error = error.with_traceback(None)
        else:
            self.residuals = self._function.captured_inputs

    def __call__(self, upstreams: Sequence[Tensor], residuals: Sequence[Tensor]) -> list[Tensor]:
        types = [output.dtype for output in self._function.outputs]
        with stop_recording():  # only what pfor makes of it is ever run, and differentiated
            return list(tf.raw_ops.StatefulPartitionedCall(args=[*upstreams, *residuals], Tout=types, f=self._function))

    def raise_its_error(self) -> None:
        """Raise what the rule raised."""
        if self._error is not None:
            raise self._error

    def judge(self, call: Call) -> None:
        """Raise where the rule is not linear."""
        self.raise_its_error()
        graph = self._function.graph
        judge(call, of_graph(graph, graph.inputs[: len(self._values)], graph.outputs))

    @property
    def gives_any(self) -> bool:
        return any(self._present)

    def fill(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """One gradient for each source again, None where the rule returned none."""
        given = iter(gradients)
        return [next(given) if present else None for present in self._present]


Residual = tuple[Tensor | int, bool]
"""A residual for all iterations, or which one of the operation's own outputs it is; whether iterations differ in it."""


def _converted(pfor: Any, residual: Tensor, own: Sequence[Tensor]) -> Residual:
    for at, output in enumerate(own):
        if output is residual:
            return at, True
    if isinstance(residual, tf.__internal__.EagerTensor):
        return residual, False
    wrapped = pfor._convert_helper(residual)
    return wrapped.t, wrapped.is_stacked


def _vectorized(rule: _Traced, outputs: Sequence[Tensor], residuals: Sequence[Residual], call: Call) -> Backward:
    kept = [(outputs[x] if isinstance(x, int) else x, is_stacked) for x, is_stacked in residuals]

    def of_one(elements: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        upstreams, stacked = elements[0], iter(elements[1])
        return rule(upstreams, [next(stacked) if is_stacked else tensor for tensor, is_stacked in kept])

    def backward(*upstreams: Tensor | None) -> list[Tensor | None]:
        rule.raise_its_error()
        if transposition() is not None:
            rule.judge(call)
        given = [
            tf.zeros_like(output) if upstream is None else tf.convert_to_tensor(upstream)
            for upstream, output in zip(upstreams, outputs, strict=True)
        ]
        stacked = [tensor for tensor, is_stacked in kept if is_stacked]
        return rule.fill(tf.vectorized_map(of_one, (given, stacked)) if rule.gives_any else [])

    return backward
