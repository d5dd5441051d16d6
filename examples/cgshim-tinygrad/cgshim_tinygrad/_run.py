"""tinygrad: one run of f, its outputs as functions of the arguments, and the rule around what it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, compress
from typing import TYPE_CHECKING, NoReturn

from tinygrad import GlobalCounters, Tensor

from cgshim.backend import Residuals, RuleScope, convert_closure, describe, refuse_hidden
from cgshim_tinygrad._graph import (
    holds_numbers,
    is_differentiated,
    may_be_differentiated,
    replaced,
    without_assignments,
)
from cgshim_tinygrad._tensors import (
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
    """One run of f, on constants in the place of its arguments and of the tensors that it captures."""

    def __init__(self, call: Call, inputs: Sequence[Tensor]) -> None:
        self.call, self.count = call, len(inputs)
        captured, rebuild = convert_closure(call.f, is_tensor)
        given = [copied(x).detach() if is_float(x) else Tensor(x.uop) for x in [*inputs, *captured]]
        before = [Tensor(x.uop) for x in given]
        kernels = GlobalCounters.kernel_count
        outputs, self.rule = call(given[: self.count], rebuild(given[self.count :]))
        self._require_unchanged(given[self.count :], before[self.count :])
        self.residuals = Residuals(call, self.rule, is_tensor, given, outputs)
        others, self.residuals.others = self.residuals.others, []
        left, outputs, others = (without_assignments(group, before) for group in (given, outputs, others))
        if GlobalCounters.kernel_count > kernels:
            others = self._refused_if_computed(others, before)
        read, forbidden = self._captured(captured, inputs)
        self.outputs = self._attached(outputs, [[*inputs, *read], before, left, outputs, others, forbidden])

    def _require_unchanged(self, captured: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """What f captured are copies, so that an assignment to one would be lost."""
        for x, old in zip(captured, before, strict=True):
            if x.uop is not old.uop:
                self.call.refuse("f must leave what it captures as it is", f"an assignment to {describe(x)}",
                                 "pass it as an argument, return its new value, and assign that")  # fmt: skip

    # --- The outputs, as functions of the arguments --------------------------------------------------------------

    def _attached(self, outputs: Sequence[Tensor], groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The outputs of one call in the graph; the rule finds the groups again in its arguments."""
        floats = [y for y in outputs if is_float(y)]
        if not floats:
            return list(outputs)
        self._like = [(y.shape, y.dtype) for y in floats]
        vector = flattened(floats)
        groups = [*groups, [vector] if may_be_differentiated(vector) else []]
        self._ends = list(accumulate(map(len, groups)))
        return self._with_floats(outputs, split(attached(vector, [*chain(*groups)], self._pull), self._like))

    def _with_floats(self, outputs: Sequence[Tensor], floats: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(floats)
        return [next(rest) if is_float(y) else y for y in outputs]

    # --- What f captured ------------------------------------------------------------------------------------------

    def _captured(self, captured: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What the rule is given of the captured tensors, and the tensors that must not be differentiated.

        Within a rule, a captured tensor is a constant as far as it is made of the inputs, and has its own derivative
        where the rule keeps it. Elsewhere it is a variable, or refused. tinygrad asks for gradients long after the
        call, and does not say by what.
        """
        in_rule = _rule.current is not None
        constants = [x.detach() for x in inputs]
        alone = [replaced(x, inputs, constants) if in_rule else x for x in captured]
        self._is_variable = [self.rule.takes_variables and is_differentiated(x) for x in alone]
        read = [
            x if in_rule or is_variable or not is_float(x) else refused(x, [x], self._refusing(x))
            for x, is_variable in zip(captured, self._is_variable, strict=True)
        ]
        forbidden = [x for x, is_variable in zip(alone, self._is_variable, strict=True) if not is_variable]
        return read, [x for x in forbidden if is_float(x)]

    def _refusing(self, culprit: Tensor) -> Refuse:
        call = self.call
        return lambda: call.refuse_captured(culprit)

    def _refused_if_computed(self, others: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """The others, without a gradient where f computed numbers: tinygrad has then forgotten of what."""
        return [
            refused(x, [x, *given], self._refuse_computed) if is_float(x) and holds_numbers(x) else x for x in others
        ]

    def _refuse_computed(self) -> NoReturn:
        self.call.refuse("a second order needs the graph of what grad_fn keeps", "a tensor that f has realized",
                         "let f not call realize() or numpy(), or keep arguments and outputs alone")  # fmt: skip

    # --- The rule --------------------------------------------------------------------------------------------------

    def _pull(self, vector: Tensor, arguments: Sequence[Tensor], upstream: Tensor) -> list[Tensor | None]:
        groups = [list(arguments[start:end]) for start, end in zip([0, *self._ends], self._ends, strict=False)]
        sources, before, left, outputs, others, forbidden, hidden = groups
        upstreams = self._with_floats([zeros_like(y) for y in outputs], split(upstream, self._like))
        outputs = self._with_floats(outputs, split(vector, self._like))
        inputs, others = ([replaced(x, before, sources) for x in group] for group in (left, others))
        values = [inputs, outputs, others, upstreams]
        refuse = self._refuse_second_order()
        gradients = self._gradients(*values) if refuse is None else self._gradients_alone(refuse, values)
        constant = [None] * (len(before) + len(left) + len(outputs) + len(others))
        options = filter(is_tensor, self.call.backend.tree_flatten(dict(self.call.options))[0])
        of_forbidden = [refused_gradient(x, self._refusing(x)) for x in forbidden]
        of_hidden = [refused_gradient(x, self._refusing(next(options, outputs[0]))) for x in hidden]
        return [*gradients, *constant, *of_forbidden, *of_hidden]

    def _gradients(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], others: Sequence[Tensor], upstreams: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """A gradient for each argument, and for each captured tensor."""
        rule = self.residuals.around(inputs, outputs, others)
        arguments, read = inputs[: self.count], inputs[self.count :]
        variables = [*compress(read, self._is_variable)]
        of_arguments, of_variables = _rule.run(True, rule, arguments, upstreams, variables)
        left = iter(of_variables)
        found = [next(left, None) if is_variable else None for is_variable in self._is_variable]
        return [*of_arguments, *found]

    def _refuse_second_order(self) -> Refuse | None:
        """What to say to whoever asks for a second order that does not exist; None where it does."""
        call = self.call
        if call.once_differentiable:
            return lambda: call.refuse_second_order("tinygrad's derivative of a gradient")
        hidden = self.residuals.hidden()
        return (lambda: refuse_hidden(call, hidden[0])) if hidden else None

    def _gradients_alone(self, refuse: Refuse, values: Sequence[Sequence[Tensor]]) -> list[Tensor | None]:
        """The gradients, with a derivative by any argument or upstream that nobody may take."""
        constants = [[x.detach() for x in group] for group in values]
        sources = [x for group in (values[0], values[3]) for x in group]
        return [None if g is None else refused(g, sources, refuse) for g in self._gradients(*constants)]


_rule: RuleScope[bool] = RuleScope("cgshim_tinygrad_rule")
