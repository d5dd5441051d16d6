"""NumPy, with the gradients of HIPS autograd.

Arrays that are not being differentiated are plain NumPy, before and after f. Under autograd, f runs on the values
inside one primitive; the vjp of a boxed call runs f again on the boxes, which makes every order right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import make_vjp
from autograd.extend import defvjp_argnums, primitive, vspace
from autograd.tracer import getval, isbox

if TYPE_CHECKING:
    from cgshim._call import Call, Rule

Array = Any


def is_tensor(x: object, /) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    return isbox(x) and hasattr(x, "dtype")


_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if isbox(x):
        return x if dtype is None else x.astype(dtype)
    return anp.array(x, dtype=dtype) if any(map(isbox, optree.tree_leaves(x))) else np.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    while isbox(x):
        x = getval(x)
    return np.asarray(x)


def stop_gradient(x: Array, /) -> Array:
    return convert_to_numpy(x)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Sequence[Array]:
    if not any(map(isbox, inputs)):
        return call(inputs)[0]
    run = _Run(call)
    outputs = _apply(run, *inputs)
    outputs = [outputs] if len(run.outputs) == 1 else list(outputs)
    return [out if _is_float(value) else value for out, value in zip(outputs, run.outputs, strict=True)]


class _Run:
    """One run of f on values, with the rule that came of it."""

    outputs: list[Array]
    rule: Rule

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, values: Sequence[Array]) -> Array:
        outputs, self.rule = self.call(values)
        for output in outputs:
            if isbox(output):
                self.call.refuse_captured(output)
        self.outputs = [np.asarray(out) if not _is_float(out) else out for out in outputs]
        return self.outputs[0] if len(self.outputs) == 1 else tuple(self.outputs)

    def rule_at(self, inputs: Sequence[Array]) -> Rule:
        """The rule with residuals that are functions of these inputs, if they are boxes of an outer derivative."""
        return self.call(inputs)[1] if any(map(isbox, inputs)) else self.rule


@primitive
def _apply(run: _Run, *inputs: Array) -> Array:
    return run([np.float64(x) if isinstance(x, float) else x for x in inputs])


def _vjp_of_apply(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run, *inputs = args

    def vjp(upstream: Any) -> list[Array]:
        upstreams = [upstream] if len(run.outputs) == 1 else [upstream[i] for i in range(len(run.outputs))]
        gradients, _ = run.rule_at(inputs)(inputs, upstreams)
        at = [argnum - 1 for argnum in argnums]
        return [vspace(inputs[i]).zeros() if gradients[i] is None else gradients[i] for i in at]

    return vjp


defvjp_argnums(_apply, _vjp_of_apply)


def _is_float(x: Array) -> bool:
    return np.result_type(x).kind in "fcV"


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array | None]]]:
    at_floats = [at for at, x in enumerate(inputs) if _is_float(x)]

    def fn_of_floats(floats: Any) -> Any:
        full = list(inputs)
        for n, at in enumerate(at_floats):
            full[at] = floats[n]
        # The inputs come back with the outputs: autograd warns of an output that does not depend on them.
        return tuple_of_boxes((tuple_of_boxes(tuple(fn(*full))), floats))

    floats = tuple(inputs[at] for at in at_floats)
    pull_back, (outputs, _) = make_vjp(fn_of_floats, floats)

    def pullback(upstreams: Sequence[Array]) -> list[Array | None]:
        gradients: list[Array | None] = [None] * len(inputs)
        unused = vspace(floats).zeros()
        for at, gradient in zip(at_floats, pull_back((tuple(upstreams), unused)), strict=True):
            gradients[at] = gradient
        return gradients

    return list(outputs), pullback
