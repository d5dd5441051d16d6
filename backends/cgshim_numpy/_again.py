"""NumPy: what a rule keeps besides arguments and outputs, as a function of the arguments, for outer derivatives.

Its values are those that the run of f has left. f runs again, on boxes, only if somebody asks for a derivative of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import defjvp_argnums, defvjp_argnums, primitive

from cgshim.backend import has_a_derivative, refuse_another_run, run_again
from cgshim_numpy._arrays import Array, agree, as_arrays, copied, is_float, is_tensor
from cgshim_numpy._boxes import levels_of
from cgshim_numpy._private import make_jvp, make_vjp
from cgshim_numpy._refusals import boxable
from cgshim_numpy._run import Run


def other_residuals_at(run: Run, values: Sequence[Array]) -> Sequence[Array]:
    """Return the other residuals as functions of the values; what f captured as a constant is what it is outside."""
    assert run.residuals is not None
    others = run.residuals.others
    if not has_a_derivative(others):
        return others
    floats = [at for at, x in enumerate(others) if is_float(x)]
    connected = dict(zip(floats, _items(_floats_among_others(*values, run=run), len(floats)), strict=True))
    constants = run.captured.constants_at(max(levels_of(values))) if run.captured else {}
    connected.update({at: constants[id(others[at])] for at in floats if id(others[at]) in constants})
    return [connected.get(at, x) for at, x in enumerate(others)]


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def _floats_among_others(*values: Array, run: Run) -> tuple[Array, ...]:
    assert run.residuals is not None
    return tuple(boxable(run.call, [x for x in run.residuals.others if is_float(x)]))


def _vjp_of_floats(
    argnums: Sequence[int], ans: Any, values: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    def vjp(upstreams: Any) -> Sequence[Array]:
        chosen = tuple(values[argnum] for argnum in argnums)
        pull_back, (_, ends) = cast(Any, make_vjp)(_run_again_on(kwargs["run"], values, argnums), chosen)
        zeros = tuple(np.zeros(x.shape, x.dtype) for x in as_arrays(_items(ends, len(chosen))))
        return _items(pull_back(tuple_of_boxes((upstreams, zeros))), len(chosen))

    return vjp


def _jvp_of_floats(
    argnums: Sequence[int], tangents: Sequence[Any], ans: Any, values: Sequence[Any], kwargs: Any
) -> Any:
    chosen = tuple(values[argnum] for argnum in argnums)
    push_forward = cast(Any, make_jvp)(_run_again_on(kwargs["run"], values, argnums), chosen)
    _, tangent = push_forward(tuple_of_boxes(tuple(tangents)))
    return tangent[0]


defvjp_argnums(_floats_among_others, _vjp_of_floats)
defjvp_argnums(_floats_among_others, _jvp_of_floats)


def _run_again_on(run: Run, values: Sequence[Array], argnums: Sequence[int]) -> Callable[[Any], Any]:
    """Return the function from the values at argnums to the other residuals, by f's own operations."""

    def residuals_and_chosen(chosen: Any) -> Any:
        xs = [*map(copied, values)]
        for n, argnum in enumerate(argnums):
            xs[argnum] = copied(chosen[n])
        # The chosen values come back too: autograd warns of an output that does not depend on its input.
        return tuple_of_boxes((tuple_of_boxes(_floats_of_another_run(run, xs)), chosen))

    return residuals_and_chosen


def _floats_of_another_run(run: Run, xs: Sequence[Array]) -> tuple[Array, ...]:
    if run.changed:
        refuse_another_run(run.call, "one that changes its arguments", "let f work on copies")
    assert run.residuals is not None
    inputs, variables = xs[: run.count], xs[run.count :]
    f = run.captured.f_around(variables) if run.captured else None
    found = run_again(run.call, inputs, run.rule, is_tensor, agree, f=f)
    others = [x for x in found if not any(x is variable for variable in variables)]
    first = run.residuals.others
    if len(others) != len(first) or any(a.shape != b.shape for a, b in zip(others, first, strict=True)):
        refuse_another_run(run.call, "others", "let f return, and its rule keep, the same tensors in each run")
    return tuple(x for x in others if is_float(x))


def _items(sequence: Any, count: int) -> list[Any]:
    return [sequence[at] for at in range(count)]
