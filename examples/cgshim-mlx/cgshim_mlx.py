"""MLX, with the gradients of mx.custom_function.

f runs on stopped inputs, and its outputs are attached to the inputs by a function of MLX's own whose vjp is the rule.
MLX tells nobody which arrays are being differentiated, so the vjp runs f again on the inputs themselves (lazily: what
the rule does not use is never computed), whose residuals are then connected, in every order.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import compress
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
import optree

from cgshim.backend import lift

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule

Array = mx.array
Gradients = Callable[[Sequence[Array], Sequence[Array]], Sequence[Array]]
"""`gradients(sources, upstreams)`: one gradient a source"""


# --- Tensors and trees ------------------------------------------------------------------------------------------


def is_tensor(x: object, /) -> bool:
    return isinstance(x, mx.array)


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if dtype is None and isinstance(x, (np.ndarray, np.generic)):
        dtype = x.dtype.name
    if isinstance(dtype, str):
        dtype = _dtype_named(dtype)
    if isinstance(x, mx.array):
        return x if dtype is None else x.astype(dtype)
    return mx.array(x, dtype)


def _dtype_named(name: str) -> mx.Dtype:
    dtype = getattr(mx, "bool_" if name == "bool" else name, None)
    if not isinstance(dtype, mx.Dtype):
        raise TypeError(f"MLX has no dtype {name}")
    return dtype


def convert_to_numpy(x: Array, /) -> Any:
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)  # NumPy has no bfloat16 of its own


def stop_gradient(x: Array, /) -> Array:
    return mx.stop_gradient(x)


# --- The gradient of a rule -------------------------------------------------------------------------------------

_rule_is_running: ContextVar[bool] = ContextVar("cgshim_mlx_rule_is_running", default=False)


@contextmanager
def _running_rule() -> Iterator[None]:
    token = _rule_is_running.set(True)
    try:
        yield
    finally:
        _rule_is_running.reset(token)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Sequence[Array]:
    captured, remake = lift(call.f, is_tensor)
    outputs, rule = call(_stopped(inputs), remake(_stopped(captured)))
    variable = [_is_variable(rule, x) for x in captured]
    # Whatever else reached f must not be differentiated; but in a running rule all that is captured is a constant.
    constant = _stopped if _rule_is_running.get() else _refusing(call)
    read = [x if is_variable else constant([x])[0] for x, is_variable in zip(captured, variable, strict=True)]
    count = len(inputs)

    def gradients(sources: Sequence[Array], upstreams: Sequence[Array]) -> list[Array]:
        given, read = list(sources[:count]), list(sources[count:])
        _, rule = call(given, remake(read))
        with _running_rule():
            of_given, of_variables = rule(given, upstreams, list(compress(read, variable)))
        left = iter(of_variables)
        found = [*of_given, *(next(left) if is_variable else None for is_variable in variable)]
        return [mx.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]

    return _attaching(call, gradients)([*inputs, *read], constant(outputs))


def _is_variable(rule: Rule, captured: Array) -> bool:
    """Whether the rule is to be told of an array that f captured: if it asks, and the array is being differentiated."""
    return rule.takes_variables and not _rule_is_running.get() and _is_traced(captured)


def _is_traced(x: Array) -> bool:
    """Whether a transformation looks at x: what evaluating it does not cut off from the graph that it came from."""
    try:
        mx.eval(x)
    except ValueError:  # x has no value, under mx.vmap and mx.compile
        return True
    graph = io.StringIO()
    mx.export_to_dot(graph, x)
    return "->" in graph.getvalue()


def _stopped(arrays: Sequence[Array]) -> list[Array]:
    return [mx.stop_gradient(x) for x in arrays]


def _refusing(call: Call) -> Callable[[Sequence[Array]], list[Array]]:
    """The identity of arrays that must not be differentiated; MLX asks for its gradient only where they are."""

    @mx.custom_function
    def identity(arrays: Sequence[Array]) -> list[Array]:
        return list(arrays)

    @identity.vjp
    def refuse(arrays: Sequence[Array], *_: Any) -> Any:
        call.refuse_captured(arrays[0])

    identity.jvp(refuse)
    identity.vmap(lambda arrays, axes: (identity(arrays), axes))
    return identity  # type: ignore[no-any-return]  # MLX has no type for it


def _attaching(call: Call, gradients: Gradients) -> Callable[[Sequence[Array], Sequence[Array]], list[Array]]:
    """The function from sources and outputs to the outputs, as functions of the sources by their gradients."""

    @mx.custom_function
    def attach(sources: Sequence[Array], outputs: Sequence[Array]) -> list[Array]:
        return list(outputs)

    @attach.vjp
    def vjp(arguments: Any, upstreams: Sequence[Array], _: Any) -> Any:
        sources, outputs = arguments
        return gradients(sources, upstreams), [mx.zeros_like(y) for y in outputs]

    @attach.jvp
    def jvp(arguments: Any, tangents: Any) -> list[Array]:
        """J v, as the transpose of the rule: the gradient of <gradients(upstream), v> with respect to upstream."""
        if not call.forward_mode:
            call.refuse_forward_mode("mx.jvp")
        sources, outputs = arguments
        of_sources = [mx.zeros_like(x) if t is None else t for x, t in zip(sources, tangents[0], strict=True)]
        _, transposed = mx.vjp(lambda *us: gradients(sources, us), [mx.zeros_like(y) for y in outputs], of_sources)
        return list(transposed)

    @attach.vmap
    def vmap(arguments: Any, axes: Any) -> Any:
        sources, outputs = ([*zip(each, its_axes, strict=True)] for each, its_axes in zip(arguments, axes, strict=True))
        size = next(x.shape[axis] for x, axis in sources + outputs if axis is not None)
        batched = _attaching(call, mx.vmap(gradients))
        return batched(_batched(sources, size), _batched(outputs, size)), [0] * len(outputs)

    return attach


def _batched(arrays: Sequence[tuple[Array, int | None]], size: int) -> list[Array]:
    """Arrays with their batch axis in front; one that has none is repeated."""
    return [mx.broadcast_to(x, (size, *x.shape)) if axis is None else mx.moveaxis(x, axis, 0) for x, axis in arrays]


# --- Any function's gradient ------------------------------------------------------------------------------------


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array | None]]]:
    """MLX's own takes the upstream gradients with the function: it is asked again for each pullback."""
    floats = [at for at, x in enumerate(inputs) if mx.issubdtype(x.dtype, mx.inexact)]

    def fn_of_floats(*xs: Array) -> Sequence[Array]:
        full = list(inputs)
        for at, x in zip(floats, xs, strict=True):
            full[at] = x
        return fn(*full)

    def pullback(upstreams: Sequence[Array]) -> list[Array | None]:
        _, found = mx.vjp(fn_of_floats, [inputs[at] for at in floats], list(upstreams))
        gradients: list[Array | None] = [None] * len(inputs)
        for at, gradient in zip(floats, found, strict=True):
            gradients[at] = gradient
        return gradients

    return fn(*inputs), pullback


def jvp(fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], tangents: Sequence[Array], /) -> Sequence[Array]:
    _, of_outputs = mx.jvp(fn, list(inputs), list(tangents))
    return of_outputs
