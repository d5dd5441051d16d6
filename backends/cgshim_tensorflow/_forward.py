"""A rule in forward mode: its transpose, where the rule is linear."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function

from cgshim_tensorflow._linear import Linearity
from cgshim_tensorflow._origins import listening

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any
Backward = Callable[..., Sequence[Tensor | None]]
"""From one upstream gradient for each output, None where it was not used, to one gradient for each source."""

ACCUMULATOR = "tf.autodiff.ForwardAccumulator"


class Transposition:
    """The runs of rules by which an accumulator transposes them: each is looked at, and judged when all are done."""

    def __init__(self, is_of_function: bool = False) -> None:
        self._seen: list[tuple[Call, Linearity]] = []
        self.is_of_function = is_of_function
        """whether it is a whole tf.function that is transposed, whose second derivatives are built with the first"""

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """While the runs of the rule are those of an accumulator."""
        token = _transposition.set(self)
        try:
            yield
        finally:
            _transposition.reset(token)

    def run(
        self, call: Call, rule: Callable[..., Sequence[Tensor | None]], upstreams: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """The rule's gradients, while its operations are looked at."""
        token = _transposition.set(None)  # a rule within the rule is not this one
        linearity = Linearity(upstreams)
        self._seen.append((call, linearity))
        try:
            with listening(linearity.notice):
                gradients = rule(*upstreams)
            linearity.conclude(gradients)
        finally:
            _transposition.reset(token)
        return gradients

    def refuse_what_is_not_linear(self) -> None:
        """Raise where a run was seen not to be linear, or, unless the author promised it, not seen to be linear."""
        for call, linearity in self._seen:
            judge(call, linearity)


def judge(call: Call, linearity: Linearity) -> None:
    """Raise for a rule that is not linear; where nobody can tell, unless the author promised that it is."""
    if not call.forward_mode and (linearity.doubt or linearity.fault):
        call.refuse_forward_mode(ACCUMULATOR)
    if linearity.fault:
        call.refuse_nonlinear(linearity.fault)


_transposition: ContextVar[Transposition | None] = ContextVar("cgshim_tensorflow_transposition", default=None)


def transposition() -> Transposition | None:
    """What looks at the run of a rule that goes on, if an accumulator transposes the rule by it."""
    return _transposition.get()


def _looking_at_rules(build: Callable[..., Any]) -> Callable[..., Any]:
    """An accumulator around a tf.function transposes all of it while it builds the function that gives tangents."""

    @functools.wraps(build)
    def looked_at(function: Any, outputs: Any, inference_args: Any, input_tangents: Any) -> Any:
        if not input_tangents:
            return build(function, outputs, inference_args, input_tangents)
        transposition = Transposition(is_of_function=True)
        with transposition.going_on():
            built = build(function, outputs, inference_args, input_tangents)
        transposition.refuse_what_is_not_linear()
        return built

    return looked_at


_Functions = concrete_function._TapeGradientFunctions
_Functions._build_functions_for_outputs = _looking_at_rules(_Functions._build_functions_for_outputs)


def of_graph(graph: Any, upstreams: Sequence[Tensor], gradients: Sequence[Tensor]) -> Linearity:
    """What is seen of a rule that was traced."""
    linearity = Linearity(upstreams)
    for operation in graph.get_operations():
        attributes = ("f", operation.get_attr("f")) if "f" in operation.node_def.attr else ()
        linearity.notice(operation.type, list(operation.inputs), attributes, list(operation.outputs))
    linearity.conclude(gradients)
    return linearity


def graph_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """The graph that a tensor was made in, as the one to build on; nothing for an eager tensor."""
    eager = isinstance(tensor, tf.__internal__.EagerTensor)
    return contextlib.nullcontext() if eager else tensor.graph.as_default()
