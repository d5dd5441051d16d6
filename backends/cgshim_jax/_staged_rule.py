"""A rule as a jaxpr, from residuals and upstream gradients to gradients."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cgshim.backend import CustomGradientError
from cgshim_jax._linearity import Linearity, linearity_of
from cgshim_jax._rules import apply_rule, is_differentiable, type_of_upstream
from cgshim_jax._tracing import Jaxpr, jaxpr_of

if TYPE_CHECKING:
    from cgshim.backend import Rule

Array = Any


class StagedRule:
    """A rule as a jaxpr; or the error that its author raises, which comes when a gradient is asked for."""

    jaxpr: Jaxpr | None = None
    error: Exception | None = None
    outputs: int
    float_at: list[int]
    """which outputs have an upstream"""
    returned: list[int]
    """which gradients the rule returns, of those of the inputs and then of the variables"""
    arguments: list[int]
    """which arguments of f have a gradient"""
    gradients_of_arguments: list[int]
    """which of the gradients are theirs"""
    kept_outputs: list[int]
    """which outputs are the last residuals"""
    connected: list[bool]
    """which of the other residuals have a derivative through f's own operations"""
    order: list[int]
    """the residuals in the order in which the jaxpr captured them"""

    def __init__(self, outputs: Sequence[Array]) -> None:
        self.outputs = len(outputs)
        self.float_at = [i for i, y in enumerate(outputs) if is_differentiable(y)]
        self._linearity: Linearity | None = None

    def stage(
        self,
        rule: Rule,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        variables: Sequence[Array],
        known: Sequence[Array] = (),
    ) -> list[Array]:
        """Stage the rule, and return the tracers that it captured, and which of the known tensors.

        An error in it is raised if a gradient is taken.
        """

        def backward(*of_floats: Array) -> list[Array]:
            upstreams = dict(zip(self.float_at, of_floats, strict=True))
            gradients = apply_rule(rule, inputs, outputs, upstreams, variables)
            self.returned = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return [gradients[i] for i in self.returned]

        try:
            types = [type_of_upstream(outputs[i].aval) for i in self.float_at]
            self.jaxpr, captured = jaxpr_of(backward, types, known)
        except Exception as error:  # noqa: BLE001  # the author's own may be a way to forbid gradients
            self.error = _without_frames(error)
            self.returned = [i for i, x in enumerate([*inputs, *variables]) if is_differentiable(x)]
            return []
        return captured

    def sort(self, captured: Sequence[Array], inputs: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        """Tell the outputs that the rule keeps from the other residuals of f, and return these."""
        known = {id(x) for x in inputs}
        place = {id(outputs[at]): at for at in reversed(self.float_at) if id(outputs[at]) not in known}
        others = [c for c in captured if id(c) not in place]
        kept = [c for c in captured if id(c) in place]
        self.kept_outputs = [place[id(c)] for c in kept]
        self.connected = [is_differentiable(c) for c in others]
        at = {id(c): i for i, c in enumerate([*others, *kept])}
        self.order = [at[id(c)] for c in captured]
        return others

    def match(self, gradient_at: Sequence[int]) -> None:
        """Find out which arguments of f have a gradient; gradient_at tells for each of them where it would be."""
        self.arguments = [i for i, gradient in enumerate(gradient_at) if gradient in self.returned]
        self.gradients_of_arguments = [gradient_at[i] for i in self.arguments]

    def __call__(self, residuals: Sequence[Array], upstreams: Sequence[Array]) -> list[Array]:
        """Return the gradients of the arguments that have one."""
        if self.error is not None:
            raise self.error
        assert self.jaxpr is not None
        gradients = self.jaxpr([residuals[i] for i in self.order], upstreams)
        values = dict(zip(self.returned, gradients, strict=True))
        return [values[at] for at in self.gradients_of_arguments]

    def linearity(self) -> Linearity:
        """Find out, once, if the rule is linear in its upstreams."""
        if self.error is not None:
            raise self.error
        assert self.jaxpr is not None
        if self._linearity is None:
            self._linearity = linearity_of(self.jaxpr)
        return self._linearity


def _without_frames(error: Exception) -> Exception:
    """Return the error without its frames, which would keep tracers alive; a note tells where it was raised."""
    origin = traceback.extract_tb(error.__traceback__)[-1]
    if hasattr(error, "add_note") and not isinstance(error, CustomGradientError):
        error.add_note(f'Raised by the rule, in "{origin.filename}", line {origin.lineno}')
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
