"""A rule in forward mode: its transpose, if the rule is linear."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from cgshim_tensorflow._linear import Linearity
from cgshim_tensorflow._origins import Listening
from cgshim_tensorflow._private import FunctionGradients
from cgshim_tensorflow._values import is_eager

if TYPE_CHECKING:
    from cgshim.backend import Call

Tensor = Any
Backward = Callable[..., Sequence[Tensor | None]]
"""takes one upstream gradient for each output, None if it was not used; returns one gradient for each source"""

ACCUMULATOR = "tf.autodiff.ForwardAccumulator"


class Transposition:
    """The runs of rules by which an accumulator transposes them: each is observed, and judged when all are done."""

    def __init__(self, is_of_function: bool = False) -> None:
        self._seen: list[tuple[Call, Linearity]] = []
        self.is_of_function = is_of_function
        """whether a whole tf.function is transposed, whose second derivatives are built with the first"""

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """While an accumulator runs the rule."""
        token = _transposition.set(self)
        try:
            yield
        finally:
            _transposition.reset(token)

    def observe(
        self, call: Call, rule: Callable[..., Sequence[Tensor | None]], upstreams: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run the rule, observe its operations, and return its gradients."""
        token = _transposition.set(None)  # a rule within the rule is not this one
        linearity = Linearity(upstreams)
        self._seen.append((call, linearity))
        try:
            with Listening(linearity.notice):
                gradients = rule(*upstreams)
            linearity.conclude(gradients)
        finally:
            _transposition.reset(token)
        return gradients

    def refuse_what_is_not_linear(self) -> None:
        """Raise an error for a rule that is not linear, or that may not be and was not promised to be."""
        for call, linearity in self._seen:
            judge(call, linearity)


def judge(call: Call, linearity: Linearity) -> None:
    """Raise an error for a rule that is not linear, or that may not be and was not promised to be."""
    if not call.forward_mode and (linearity.doubt or linearity.fault):
        call.refuse_forward_mode(ACCUMULATOR)
    if linearity.fault:
        call.refuse_nonlinear(linearity.fault)


_transposition: ContextVar[Transposition | None] = ContextVar("cgshim_tensorflow_transposition", default=None)


def transposition() -> Transposition | None:
    """Return the transposition that is going on, if an accumulator is running the rule; else None."""
    return _transposition.get()


def _observing_rules(build: Callable[..., Any]) -> Callable[..., Any]:
    """Observe rules here too: an accumulator transposes a tf.function while it builds what gives its tangents."""

    @functools.wraps(build)
    def observed(function: Any, outputs: Any, inference_args: Any, input_tangents: Any) -> Any:
        if not input_tangents:
            return build(function, outputs, inference_args, input_tangents)
        transposition = Transposition(is_of_function=True)
        with transposition.going_on():
            built = build(function, outputs, inference_args, input_tangents)
        transposition.refuse_what_is_not_linear()
        return built

    return observed


FunctionGradients._build_functions_for_outputs = _observing_rules(FunctionGradients._build_functions_for_outputs)


def linearity_of_graph(graph: Any, upstreams: Sequence[Tensor], gradients: Sequence[Tensor]) -> Linearity:
    """Return what the operations of a traced rule show."""
    linearity = Linearity(upstreams)
    for operation in graph.get_operations():
        attributes = ("f", operation.get_attr("f")) if "f" in operation.node_def.attr else ()
        linearity.notice(operation.type, list(operation.inputs), attributes, list(operation.outputs))
    linearity.conclude(gradients)
    return linearity


def graph_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Build in the graph of a tensor; for an eager tensor, change nothing."""
    return contextlib.nullcontext() if is_eager(tensor) else tensor.graph.as_default()
