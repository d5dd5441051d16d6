"""TensorFlow: a rule on tapes, in graphs and in forward mode, over tensors alone; what is static is bound outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import optree
import tensorflow as tf
from _cgshim_tensorflow_forward import Backward, is_differentiable, is_linear
from _cgshim_tensorflow_rule import attach, readable, run, running_rule
from tensorflow.python.eager.record import VariableWatcher
from tensorflow.python.framework.weak_tensor import WeakTensor
from tensorflow.python.trackable.data_structures import ListWrapper, _DictWrapper, _TupleWrapper

if TYPE_CHECKING:
    from cgshim._call import Call
    from cgshim._convention import Rule

Tensor = Any


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)  # tf.is_tensor is true of a Keras Variable too


_TENSORS = (tf.Tensor, tf.Variable, WeakTensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True, namespace=_NAMESPACE)
    if any(_learn(type(leaf)) for leaf in leaves):
        return tree_flatten(tree)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    dtype = None if dtype is None else tf.as_dtype(dtype)
    if hasattr(x, "dtype"):  # a tensor or an array is cast; a number is read in its dtype at once
        x = x if _is_composite(x) else tf.convert_to_tensor(x)
        return x if dtype in (None, x.dtype) else tf.cast(x, dtype)
    return tf.convert_to_tensor(x, dtype)


def convert_to_numpy(x: Tensor, /) -> Any:
    x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
    return x.numpy() if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x).numpy()


def stop_gradient(x: Tensor, /) -> Tensor:
    return _with_values(x, tf.stop_gradient(_values(x)))


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Sequence[Tensor]:
    follow = _autograph()
    call.f = follow(call.f)
    inputs = [readable(x) for x in inputs]
    with VariableWatcher() as watcher:
        outputs, rule, watched, captured = run(call, inputs)
    variables = [*sorted(watcher.watched_variables(), key=lambda variable: variable._unique_id), *watched]
    rule.require_variables(variables)
    rule = rule.with_grad_fn(follow(rule.grad_fn))
    backward = _backward(rule, inputs, outputs, variables, captured)
    sources = [*map(_values, inputs), *map(tf.convert_to_tensor, variables), *captured]
    values = [_values(output) for output in outputs]
    attached = attach(call, sources, values, backward, functools.partial(is_linear, backward, values))
    return [_with_values(output, value) for output, value in zip(outputs, attached, strict=True)]


def _backward(
    rule: Rule,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    variables: Sequence[Tensor],
    captured: Sequence[Tensor],
) -> Backward:
    """The rule over what tapes and graphs hand around: the values of tensors, and None for what is not there."""
    kept = inputs if rule.needs_inputs else ()
    composite = [_is_composite(x) for x in inputs]

    def backward(*upstreams: Tensor | None) -> list[Tensor | None]:
        given = [_upstream(u, y) for u, y in zip(upstreams, outputs, strict=True)]
        with running_rule():
            gradients, of_variables = rule(kept, given, variables)
        of_values = [_values(g) if takes_apart else g for g, takes_apart in zip(gradients, composite, strict=True)]
        return [*of_values, *of_variables, *map(_unknown_gradient, captured)]

    return backward


def _unknown_gradient(x: Tensor) -> Tensor:
    """NaN for a tensor of a graph that f captured: whether it is differentiated is only known when it is too late."""
    return tf.fill(tf.shape(x), tf.constant(float("nan"), x.dtype))


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor | None]]]:
    values = [tf.identity(_values(x)) for x in inputs]  # a tensor that is given twice has two gradients
    watched = [value for value in values if is_differentiable(value)]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(watched)
        outputs = list(fn(*map(_with_values, inputs, values)))

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        pairs = zip(map(_values, outputs), map(_values, upstreams), strict=True)
        used = [(value, upstream) for value, upstream in pairs if is_differentiable(value)]
        gradients = tape.gradient(
            [value for value, _ in used], watched, output_gradients=[upstream for _, upstream in used],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )  # fmt: skip
        found = iter(gradients)
        return [
            _with_values(x, tf.convert_to_tensor(next(found))) if is_differentiable(value) else None
            for x, value in zip(inputs, values, strict=True)
        ]

    return outputs, pullback


def _autograph() -> Callable[[Any], Any]:
    """What converts a function as AutoGraph converts its caller, so that `if` and `while` on tensors work in it."""
    if tf.executing_eagerly():
        return lambda function: function
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())


def _upstream(upstream: Tensor | None, output: Tensor) -> Tensor:
    """The gradient of an output as the rule expects it: zeros where it was not used, and never sparse."""
    values = tf.zeros_like(_values(output)) if upstream is None else tf.convert_to_tensor(upstream)
    return _with_values(output, values)


# --- Composite tensors: leaves whose values alone have gradients ------------------------------------------------


def _is_composite(x: object) -> bool:
    return isinstance(x, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))


def _values(x: Tensor) -> Tensor:
    """What of x is differentiated."""
    if isinstance(x, tf.RaggedTensor):
        return x.flat_values
    return x.values if _is_composite(x) else x


def _with_values(x: Tensor, values: Tensor) -> Tensor:
    """A tensor like x round other values."""
    if isinstance(x, tf.RaggedTensor):
        return x.with_flat_values(values)
    if isinstance(x, tf.SparseTensor):
        return x.with_values(values)
    if isinstance(x, tf.IndexedSlices):
        return tf.IndexedSlices(values, x.indices, x.dense_shape)
    return values


# --- Containers that `tf.nest` knows and optree does not ---------------------------------------------------------

_NAMESPACE = "cgshim.tensorflow"


def _register(kind: Any, children: Callable[[Any], Sequence[Any]], rebuild: Callable[[Sequence[Any]], Any]) -> None:
    optree.register_pytree_node(
        kind, lambda x: (children(x), None), lambda _, leaves: rebuild(list(leaves)), namespace=_NAMESPACE
    )


for _wrapper, _plain in ((ListWrapper, list), (_DictWrapper, dict), (_TupleWrapper, tuple)):  # attributes of tf.Module
    _register(_wrapper, lambda x, plain=_plain: [plain(x)], lambda children: children[0])  # type: ignore[misc]


def _learn(kind: Any) -> bool:
    """Register a class with `__tf_flatten__`, or one of attrs; False for what is a leaf indeed."""
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    if hasattr(kind, "__tf_flatten__"):
        apart: Callable[[Any], Any] = lambda x: x.__tf_flatten__()[::-1]
        together: Callable[[Any, Any], Any] = lambda static, parts: kind.__tf_unflatten__(static, tuple(parts))
        optree.register_pytree_node(kind, apart, together, namespace=_NAMESPACE)
    elif names:
        _register(kind, lambda x: [getattr(x, name) for name in names], lambda children: kind(*children))
    else:
        return False
    return True
