"""NumPy: an op as a primitive of HIPS autograd: its outputs, and their derivatives, which are the rule's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autograd.extend import defjvp_argnums, defvjp_argnums, primitive

from cgshim_numpy._arrays import Array, as_arrays
from cgshim_numpy._boxes import levels_of
from cgshim_numpy._captured import captured_by
from cgshim_numpy._private import isbox
from cgshim_numpy._rule import gradients_of, needed_by_rule, tangent_of
from cgshim_numpy._run import Run, refuse_boxes

if TYPE_CHECKING:
    from cgshim.backend import Call


def output_under_autograd(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output of a call, connected with the boxes among its inputs, and with those that f captured."""
    captured = captured_by(call, inputs)
    values = inputs if captured is None else [*inputs, *captured.variables]
    levels = levels_of(values)
    if not levels:
        return _output_of_constants(call, inputs)
    if call.takes_needed:
        call = call.with_needed([isbox(x) for x in inputs])
    run = Run(call, len(inputs), captured, is_nested=len(levels) > 1)
    ans = _outputs_of(*values, run=run)
    return run.rule.output.combine(run.outputs_in(ans))


def _output_of_constants(call: Call, inputs: Sequence[Array]) -> Any:
    """Return the output of a call if nothing that f is given is differentiated."""
    if call.takes_needed:
        call = call.with_needed([False] * len(inputs))
    outputs, rule = call(inputs)
    refuse_boxes(call, outputs)
    return rule.output.combine(outputs)


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def _outputs_of(*values: Array, run: Run) -> Any:
    """Return the output of f, or a tuple of several."""
    outputs = run.run_f(as_arrays(values))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _vjp_of_outputs(
    argnums: Sequence[int], ans: Any, values: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run: Run = kwargs["run"]
    values, outputs = needed_by_rule(run, values, ans)

    def vjp(upstream: Any) -> Sequence[Array]:
        gradients = gradients_of(run, values, outputs, run.per_output(upstream), argnums)
        return gradients if len(gradients) == len(argnums) else [gradients[argnum] for argnum in argnums]

    return vjp


def _jvp_of_outputs(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, values: Sequence[Any], kwargs: Any
) -> Any:
    run: Run = kwargs["run"]
    if not run.call.forward_mode:
        run.call.refuse_forward_mode("autograd's make_jvp")
    return tangent_of(run, as_arrays(values), ans, argnums, tangents)


defvjp_argnums(_outputs_of, _vjp_of_outputs)
defjvp_argnums(_outputs_of, _jvp_of_outputs)
