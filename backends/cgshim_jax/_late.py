"""Rules that are staged when a derivative is asked for: many programs that jit compiles ask for none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cgshim.backend import Closure, assigned_cells_of, assigned_globals, globals_of, search_closure, subvals, written
from cgshim_jax._rules import is_tensor
from cgshim_jax._staged_rule import StagedRule
from cgshim_jax._tracing import Jaxpr, current_trace, is_tracer, jaxpr_of

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Array = Any


class LateRule:
    """A rule whose tensors were taken out of it; f's jaxpr returns those that are neither arguments nor outputs."""

    def __init__(self, rule: Rule, found: Closure, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self.outputs = len(outputs)
        others = found.tensors[len(inputs) + len(outputs) :]
        self.others = [x for x in others if is_tracer(x)]
        """the other tensors, until f's jaxpr is there; arrays stay with the rule"""
        self._others = [None if is_tracer(x) else x for x in others]
        self._others_at = [i for i, x in enumerate(others) if is_tracer(x)]
        self._rule = rule.with_grad_fn(_taken_apart)
        self._rebuild = found.rebuild
        self._inputs = [None if is_tracer(x) else x for x in inputs]

    def staged(self, f: Jaxpr, at: Sequence[int]) -> tuple[Jaxpr, StagedRule, list[Array]]:
        """Return f's jaxpr with the residuals that the rule reads, the rule, and the tracers that it captured.

        f's arguments are the inputs in the places `at`.
        """
        rule: Any = None

        def f_with_residuals(*arguments: Array) -> list[Array]:
            nonlocal rule
            inputs = subvals(self._inputs, at, arguments)
            results = f([], arguments)
            outputs = results[: self.outputs]
            rule = StagedRule(outputs)
            others = subvals(self._others, self._others_at, results[self.outputs :])
            author_rule = self._rule.with_grad_fn(self._rebuild([*inputs, *outputs, *others]))
            captured = rule.stage(author_rule, inputs, outputs, [])
            return [*outputs, *rule.sort(captured, inputs, outputs)]

        whole, captured = jaxpr_of(f_with_residuals, [v.aval for v in f.invars])
        rule.match(at)
        return whole, rule, captured


def late_rule(call: Call, rule: Rule, inputs: Sequence[Array], outputs: Sequence[Array]) -> LateRule | None:
    """Return the rule without its tensors; None if it cannot wait: it may reach others, or assigns to variables."""
    grad_fn = rule.grad_fn
    code = getattr(grad_fn, "__code__", None)
    found = search_closure(grad_fn, is_tensor, call.f, [*inputs, *outputs], trees=call.backend)
    if code is None or found.objects or found.old or assigned_cells_of(grad_fn):
        return None
    if written(call.f, but=code) or _assigns_globals(call.f) or globals_of(code, grad_fn.__globals__, call.f):
        return None
    trace = current_trace()
    if not all(map(is_tracer, outputs)) or any(is_tracer(x) and x._trace is not trace for x in found.tensors):
        return None
    return LateRule(rule, found, inputs, outputs)


def _assigns_globals(f: Callable[..., Any]) -> bool:
    """Return True if f may assign to global variables, which the rule may read."""
    function = f.func if isinstance(f, functools.partial) else f
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is None or bool(assigned_globals(code))


def _taken_apart(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a rule whose tensors were taken out is put around others before it is called")
