"""NumPy: an op as a primitive of HIPS autograd: its outputs, and their derivatives, which are the rule's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autograd.extend import defjvp_argnums, defvjp_argnums, primitive

from cgshim_numpy._arrays import Array
from cgshim_numpy._boxes import has_box, levels_of
from cgshim_numpy._closed_over import closed_over_by
from cgshim_numpy._private import isbox
from cgshim_numpy._record import BELOW_ALL
from cgshim_numpy._recorded_run import RecordedRun
from cgshim_numpy._rule import Level, plain_vjp
from cgshim_numpy._run import Run, values_of

if TYPE_CHECKING:
    from cgshim.backend import Call
    from cgshim_numpy._plain import PlainRules


def output_under_autograd(call: Call, inputs: Sequence[Array], plain: PlainRules | None = None) -> Any:
    """Return the output of a call, connected with the boxes among its inputs, and with those that f closes over."""
    closed_over = closed_over_by(call, inputs)
    values = inputs if closed_over is None else [*inputs, *closed_over.boxes]
    levels = levels_of(values)
    if call.takes_needed:
        call = call.with_needed([isbox(x) for x in inputs])
    if not levels:
        outputs, rule = call(inputs)
        return rule.output.combine(values_of(call, outputs) if has_box(outputs) else outputs)
    is_first_order = len(levels) == 1 and BELOW_ALL not in levels
    run: Run
    if closed_over is None and (is_first_order or call.once_differentiable):
        run = Run(call, len(inputs), plain if is_first_order else None)
    else:
        run = RecordedRun(call, len(inputs), closed_over, values)
    ans = _outputs_of(*values, run=run)
    return ans if run.grad_fn is not None else run.rule.output.combine(run.outputs_in(ans))


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def _outputs_of(*values: Array, run: Run) -> Any:
    """Return the output of f, or a tuple of several."""
    outputs = run.run_f(values)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _vjp_of_outputs(
    argnums: Sequence[int], ans: Any, values: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run: Run = kwargs["run"]
    if run.grad_fn is not None:
        return plain_vjp(run, argnums)
    level = Level(run, values, ans)
    return lambda upstream: level.gradients(run.per_output(upstream), argnums)


def _jvp_of_outputs(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, values: Sequence[Any], kwargs: Any
) -> Any:
    run: Run = kwargs["run"]
    if not run.call.forward_mode:
        run.call.refuse_forward_mode("autograd's make_jvp")
    return Level(run, values, ans).tangent(ans, argnums, tangents)


defvjp_argnums(_outputs_of, _vjp_of_outputs)
defjvp_argnums(_outputs_of, _jvp_of_outputs)
