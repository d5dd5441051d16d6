"""A rule under `tf.vectorized_map`: the gradient of all iterations is the vectorized rule.

`pfor` rewrites the operations of a loop's body one by one. If an operation has a gradient of its own, pfor keeps its
values alone, and autodiff's gradient with them. So the rule is rewritten here as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from cgshim_tensorflow._forward import Backward, graph_of, judge, linearity_of_graph, transposition
from cgshim_tensorflow._private import record, wrap_for_pfor
from cgshim_tensorflow._values import is_eager

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any


def converter(
    count: int, backward: Backward, attach: Callable[..., list[Tensor]], call: Call
) -> Callable[[Any], list[Any]]:
    """Return what pfor calls to vectorize an operation on `count` values and then sources with this gradient."""

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
        return [wrap_for_pfor(tensor) for tensor in [*outputs, *sources]]

    return convert


class _Traced:
    """A rule as a function of tensors alone: its upstream gradients and its residuals."""

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
        with record.stop_recording():  # only what pfor makes of it is run and differentiated
            return list(tf.raw_ops.StatefulPartitionedCall(args=[*upstreams, *residuals], Tout=types, f=self._function))

    def raise_its_error(self) -> None:
        """Raise the error that the rule raised when it was traced, if it did."""
        if self._error is not None:
            raise self._error

    def judge(self, call: Call) -> None:
        """Raise an error if the rule is not linear."""
        self.raise_its_error()
        graph = self._function.graph
        judge(call, linearity_of_graph(graph, graph.inputs[: len(self._values)], graph.outputs))

    @property
    def gives_any(self) -> bool:
        return any(self._present)

    def fill(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return one gradient for each source again, None if the rule returned none for it."""
        given = iter(gradients)
        return [next(given) if present else None for present in self._present]


Residual = tuple[Tensor | int, bool]
"""a residual, or the index of the output that it is; and whether it is stacked, with a row for each iteration"""


def _converted(pfor: Any, residual: Tensor, own: Sequence[Tensor]) -> Residual:
    for at, output in enumerate(own):
        if output is residual:
            return at, True
    if is_eager(residual):
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
