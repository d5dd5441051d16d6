"""tinygrad: one run of f, its outputs as functions of the arguments, and the rule that it returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinygrad import GlobalCounters, Tensor

from cgshim.backend import is_in_rule, tensors_inside
from cgshim_tinygrad import _graph as graph
from cgshim_tinygrad._tensors import (
    GIVEN,
    HIDDEN,
    Refuse,
    attached,
    copied,
    flattened,
    is_float,
    is_tensor,
    refused,
    refused_gradient,
    split,
    zeros_like,
)

if TYPE_CHECKING:
    from cgshim.backend import Call


class Run:
    """One run of f, on constants in the place of its arguments."""

    def __init__(self, call: Call, inputs: Sequence[Tensor]) -> None:
        self.call, self.inputs = call, inputs
        self.sources = [Tensor(x.uop) for x in inputs]
        self.given = [copied(x, GIVEN).detach() if is_float(x) else Tensor(x.uop) for x in inputs]
        self.before = [Tensor(x.uop) for x in self.given]
        kernels, marker = GlobalCounters.kernel_count, Tensor(0)
        self.made, self.rule = call(self.given)
        self.numbers = (
            graph.stored_since(marker) if GlobalCounters.kernel_count > kernels else set()
        )
        values = graph.without_assignments(self.made, self.before)
        self.outputs = self._attached(values)
        # what f returns twice is read as the first of these
        for y, own in reversed([*zip(self.made, self.outputs, strict=True)]):
            if is_float(y) and graph.is_newer(y, marker):
                y.uop = graph.replaced(
                    own, self.sources, self.before
                ).uop  # the rule's derivative, where the rule reads it

    # --- The outputs, as functions of the arguments -----------------------------------------------

    def _attached(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of one call in the graph.

        tinygrad asks for gradients long after the call, and does not say by what. So everything
        that f captured has one here, through the value itself, and that gradient is an error.
        Within a rule, captured tensors are constants.
        """
        floats = [y for y in values if is_float(y)]
        if not floats:
            return list(values)
        self._like = [(y.shape, y.dtype) for y in floats]
        vector = flattened(floats)
        self.variables, hidden = self.call.variables, []
        if not is_in_rule():
            self.variables = self.call.captured_variables(self._captured(vector), self.inputs)
            self.call.require_variables(self.rule, self.variables)
            captured = graph.without_gradient(vector, self.variables)
            if graph.may_be_differentiated(captured):
                hidden = [copied(captured, HIDDEN)]
        sources = [*self.sources, *self.variables, *hidden]
        return self._with_floats(values, split(attached(vector, sources, self._pull), self._like))

    def _captured(self, vector: Tensor) -> list[Tensor]:
        """The differentiated tensors of f that are variables, if the rule takes any."""
        if not self.rule.takes_variables:
            return []
        captured = [*self.call.variables, *tensors_inside(self.call.f, is_tensor, 20)]
        return [x for x in graph.nearest([vector], captured) if graph.is_differentiated(x)]

    def _with_floats(self, outputs: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(floats)
        return [next(rest) if is_float(y) else y for y in outputs]

    def _refuse_captured(self) -> None:
        """Name a tensor that f reads."""
        options = filter(is_tensor, self.call.backend.tree_flatten(dict(self.call.options))[0])
        found = graph.nearest(self.made, [*options, *tensors_inside(self.call.f, is_tensor)])
        self.call.refuse_captured([*found, *self.made][0])

    # --- The rule ---------------------------------------------------------------------------------

    def _pull(
        self, vector: Tensor, arguments: Sequence[Tensor], upstream: Tensor
    ) -> list[Tensor | None]:
        upstreams = self._with_floats(
            [zeros_like(y) for y in self.made], split(upstream, self._like)
        )
        of_inputs, of_variables = self.rule(self.given, upstreams, self.variables)
        known = len(self.sources) + len(self.variables)
        sources, hidden = arguments[:known], arguments[known:]
        gradients = self._connected([*of_inputs, *of_variables], sources)
        refuse = self._refuse_second_order(gradients)
        if refuse is not None:
            gradients = [
                None if g is None else refused(g, [*sources, upstream], refuse) for g in gradients
            ]
        return [*gradients, *(refused_gradient(x, self._refuse_captured) for x in hidden)]

    def _connected(
        self, gradients: Sequence[Tensor | None], sources: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """The gradients as they would be if f had run on the sources, which tinygrad may have
        replaced meanwhile.
        """
        old = [*self.before, *self.sources, *self.variables]
        new = [*sources[: len(self.before)], *sources]
        left = iter(graph.without_assignments([g for g in gradients if g is not None], self.before))
        return [None if g is None else graph.replaced(next(left), old, new) for g in gradients]

    def _refuse_second_order(self, gradients: Sequence[Tensor | None]) -> Refuse | None:
        """What to say to whoever asks for a second order that does not exist; None where it does."""
        call = self.call
        if call.once_differentiable:
            return lambda: call.refuse_second_order("tinygrad's derivative of a gradient")
        converted = self.rule.output.converted
        for x in (
            tensors_inside(self.rule.grad_fn, lambda x: id(x) in converted) if converted else ()
        ):
            return lambda: call.refuse_unconnected(x, "f has returned as an array of NumPy's")
        held = tensors_inside(self.rule.grad_fn, is_tensor) if self.numbers else []
        found = [x for x in [*held, *gradients] if x is not None and graph.reads(x, self.numbers)]
        if any(x is g for x in found for g in gradients):
            return lambda: call.refuse_unconnected(found[0], "f made of values that Python read")
        return None
