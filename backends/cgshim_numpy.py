"""NumPy, with the gradients of HIPS autograd.

Arrays that are not being differentiated are plain NumPy, before and after f. Under autograd, f runs on the values
inside one primitive; the vjp of a boxed call runs f again on the boxes, which makes every order right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import defjvp_argnums, make_vjp
from autograd.extend import defvjp_argnums, primitive, vspace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox, trace_stack

from cgshim._closure import lift

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Array = Any


def is_tensor(x: object, /) -> bool:
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind in "biufc" or x.dtype.name in _ML_DTYPES
    return isinstance(x, ArrayBox)


_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # of kind V, like records, but numbers


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if isbox(x):
        return x if dtype is None or x.dtype == dtype else x.astype(dtype)
    return anp.array(x, dtype=dtype) if any(map(isbox, optree.tree_leaves(x))) else np.asarray(x, dtype=dtype)


def convert_to_numpy(x: Array, /) -> Any:
    while isbox(x):
        x = getval(x)
    return np.asarray(x)


def stop_gradient(x: Array, /) -> Array:
    return convert_to_numpy(x)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Sequence[Array]:
    if trace_stack.top < 0:  # nothing is being differentiated
        return call(inputs)[0]
    run = _Run(call, len(inputs))
    if not any(map(isbox, (*inputs, *run.variables))):
        return run.checked(call(inputs, run.remake_f(run.variables))[0])
    outputs = _apply(run, *inputs, *run.variables)
    outputs = [outputs] if len(run.floats) == 1 else outputs
    return [out if is_float else convert_to_numpy(out) for out, is_float in zip(outputs, run.floats, strict=True)]


class _Run:
    """One run of f on values, with the rule that came of it.

    The boxes that f captured are its variables: f is made again round their values, so that they take part as the
    arguments do. While a rule runs, the boxes of the derivative that it is part of are constants to the ops in it.
    """

    rule: Rule
    floats: list[bool]
    """for each output, whether it has a gradient"""

    def __init__(self, call: Call, count: int) -> None:
        self.call = call
        self.count = count
        captured, self._remake = lift(call.f, isbox)
        level = _level_of_rule.get()
        self.variables = [box for box in captured if box._trace > level]
        self._constants = [None if box._trace > level else stop_gradient(box) for box in captured]

    def remake_f(self, variables: Sequence[Array]) -> Callable[..., Any]:
        """f round these values of its variables."""
        if not self._constants:
            return self.call.f
        values = iter(variables)
        f: Callable[..., Any] = self._remake([next(values) if c is None else c for c in self._constants])
        return f

    def __call__(self, values: Sequence[Array]) -> Array:
        outputs, self.rule = self.at(values)
        self.rule.require_variables(self.variables)
        self.floats = [*map(_is_float, self.checked(outputs))]
        outputs = [out if is_float else np.asarray(out) for out, is_float in zip(outputs, self.floats, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def at(self, values: Sequence[Array]) -> tuple[list[Array], Rule]:
        """f's outputs and its rule for these inputs and variables."""
        return self.call(values[: self.count], self.remake_f(values[self.count :]))

    def checked(self, outputs: list[Array]) -> list[Array]:
        """The outputs, when they depend on no box that reached f in a way that lift does not see."""
        for output in outputs:
            if isbox(output):
                self.call.refuse_captured(output)
        return outputs

    def separate(self, upstream: Any) -> list[Array]:
        """The upstream gradient of each output."""
        count = len(self.floats)
        return [upstream] if count == 1 else [upstream[i] for i in range(count)]

    def kept(self, values: Sequence[Array]) -> Sequence[Array]:
        """Of the values only the variables, unless the rule or an outer derivative needs the inputs too."""
        if self.rule.needs_inputs or any(map(isbox, values)):
            return values
        return [None] * self.count + list(values[self.count :])

    def gradients(self, values: Sequence[Array], upstreams: Sequence[Array], level: int) -> list[Array | None]:
        """The rule's gradients; its residuals are functions of the values when these are boxes of an outer one."""
        rule = self.at(values)[1] if any(map(isbox, values)) else self.rule
        token = _level_of_rule.set(level)
        try:
            of_inputs, of_variables = rule(values[: self.count], upstreams, values[self.count :])
        finally:
            _level_of_rule.reset(token)
        gradients = of_inputs + (of_variables or [None] * len(self.variables))
        return [self._zeros(at) if g is None else g for at, g in enumerate(gradients)]

    def _zeros(self, at: int) -> Array:
        shapes = [*self.rule.shapes, *[box.shape for box in self.variables]]
        dtypes = [*self.rule.dtypes, *[box.dtype for box in self.variables]]
        return np.zeros(shapes[at], dtypes[at])


_level_of_rule: ContextVar[int] = ContextVar("cgshim_numpy_level_of_rule", default=-1)


@primitive  # type: ignore[untyped-decorator]  # autograd has no types
def _apply(run: _Run, *values: Array) -> Array:
    return run([np.float64(x) if isinstance(x, float) else x for x in values])


def _vjp_of_apply(
    argnums: Sequence[int], ans: Any, args: Sequence[Any], kwargs: Any
) -> Callable[[Any], Sequence[Array]]:
    run, *values = args
    values = run.kept(values)

    def vjp(upstream: Any) -> list[Array]:
        gradients = run.gradients(values, run.separate(upstream), trace_stack.top)
        return [gradients[argnum - 1] for argnum in argnums]

    return vjp


def _jvp_of_apply(argnums: Sequence[int], tangents: Sequence[Any], ans: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """J v, as the transpose of the rule: the gradient of <rule(upstream), v> with respect to upstream."""
    run, *values = args
    if not run.call.forward_mode:
        run.call.refuse_forward_mode("autograd's make_jvp")
    level = trace_stack.top

    def rule(upstream: Any) -> Any:
        gradients = run.gradients(values, run.separate(upstream), level)
        return tuple_of_boxes((tuple_of_boxes(tuple(gradients[argnum - 1] for argnum in argnums)), upstream))

    zeros = vspace(ans).zeros()
    transpose, _ = make_vjp(rule, zeros)
    return transpose((tuple(tangents), zeros))


defvjp_argnums(_apply, _vjp_of_apply)
defjvp_argnums(_apply, _jvp_of_apply)


def _is_float(x: Array) -> bool:
    return x.dtype.kind in "fcV"


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
    pull_back, (outputs, _) = cast(Any, make_vjp)(fn_of_floats, floats)  # autograd has no types

    def pullback(upstreams: Sequence[Array]) -> list[Array | None]:
        gradients: list[Array | None] = [None] * len(inputs)
        unused = vspace(floats).zeros()
        for at, gradient in zip(at_floats, pull_back((tuple(upstreams), unused)), strict=True):
            gradients[at] = gradient
        return gradients

    return list(outputs), pullback
