"""Composite tensors (ragged, sparse, slices), gradients that fit them, and trees of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import tensorflow as tf

from cgshim._dispatch import framework_of
from cgshim._errors import describe_spec
from cgshim._pytree import SLOT
from cgshim.backend import CustomGradientValueError, Tensor, describe, refusal

_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def is_composite(x: object) -> bool:
    return not isinstance(x, (tf.Tensor, tf.Variable)) and isinstance(x, _COMPOSITE)


def is_weak(x: object) -> bool:
    """Return True for a WeakTensor of `tf.experimental.numpy`, which is no `tf.Tensor`."""
    return isinstance(x, tf.experimental.BatchableExtensionType) and tf.is_tensor(x)


def plain(x: Tensor) -> Tensor:
    """Return the value of a variable or of a weak tensor; keep any other tensor."""
    return tf.convert_to_tensor(x) if isinstance(x, tf.Variable) or is_weak(x) else x


def in_this_graph(x: Tensor) -> Tensor:
    """Return x as a tensor of the graph that is being built.

    The gradient of a condition in a tf.function can read no other (TensorFlow 2.21).
    """
    graph = tf.compat.v1.get_default_graph()
    return x if getattr(values_of(x), "graph", graph) is graph else tf.identity(x)


def values_of(x: Tensor) -> Tensor:
    """Return the differentiated part of a tensor: all of a dense one."""
    if not is_composite(x):
        return x
    return x.flat_values if isinstance(x, tf.RaggedTensor) else x.values


def with_values(x: Tensor, values: Tensor) -> Tensor:
    """Return a tensor like x with other values."""
    if not is_composite(x):
        return values
    own = values_of(x)
    parts = [values if part is own else part for part in tf.nest.flatten(x, expand_composites=True)]
    return tf.nest.pack_sequence_as(x, parts, expand_composites=True)


def dense(x: Tensor, like: Tensor) -> Tensor:
    """Return slices as a dense tensor of like's shape; keep anything else."""
    if not isinstance(x, tf.IndexedSlices):
        return x
    return tf.math.unsorted_segment_sum(x.values, x.indices, tf.shape(like)[0])


# --- Gradients ------------------------------------------------------------------------------------


def fitting(gradient: Tensor | None, x: Tensor, op: str, name: Callable[[], str]) -> Any:
    """Return the values of x's gradient; raise an error if they do not fit.

    The front end has compared the shapes that are known statically. A gradient of a dense tensor
    may be slices.
    """
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices) and not is_composite(x):
        if not gradient.values.shape[1:].is_compatible_with(x.shape[1:]):
            raise _misfit(op, name, x, f"IndexedSlices with the values {describe(gradient.values)}")
        return gradient
    if (is_composite(x) or is_composite(gradient)) and not _has_places_of(gradient, x):
        raise _misfit(op, name, x, f"a {type(gradient).__name__} {describe(gradient)}")
    values, like = values_of(gradient), values_of(x)
    if not values.shape.is_compatible_with(like.shape):
        raise _misfit(op, name, x, describe(values))
    if values.shape.is_fully_defined() and like.shape.is_fully_defined():
        return values
    message = str(_misfit(op, name, x, "another one when it runs"))
    check = tf.debugging.assert_equal(tf.shape(values), tf.shape(like), message)
    with tf.control_dependencies([check]):
        return tf.reshape(values, tf.shape(like))


def _has_places_of(gradient: Tensor, x: Tensor) -> bool:
    """Return False if a gradient is another kind of tensor than x, or has other indices.

    In a graph the indices are not compared.
    """
    if type(gradient) is not type(x):
        return False
    parts = [tf.nest.flatten(each, expand_composites=True) for each in (gradient, x)]
    return not tf.executing_eagerly() or all(
        a is b
        or b is values_of(x)
        or (a.shape == b.shape and bool(tf.reduce_all(tf.equal(a, tf.cast(b, a.dtype)))))
        for a, b in zip(*parts, strict=False)
    )


def _misfit(op: str, name: Callable[[], str], x: Any, got: str) -> CustomGradientValueError:
    kind = f"be a {type(x).__name__} at the same places" if is_composite(x) else "have its shape"
    spec = describe_spec(values_of(x).shape, x.dtype)
    return refusal(CustomGradientValueError, op,
                   must=f"the gradient of {name()} must {kind} {spec}", got=got,
                   do="sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule")  # fmt: skip


# --- Trees, by optree, with the containers that only `tf.nest` supports ----------------------------

_NAMESPACE = "cgshim.tensorflow"
tree_unflatten = optree.tree_unflatten
_learned: set[type] = set()
"""the registered classes, found in trees"""


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    is_leaf = _holds_no_tensor if _learned else None
    leaves, structure = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if any(_learn(leaf) for leaf in leaves):
        return tree_flatten(tree)
    return leaves, structure


def _learn(x: Any) -> bool:
    """Register a container's class; return False for any other class, and for a registered one.

    Containers are objects with `__tf_flatten__`, objects of attrs, and the wrappers that a
    tf.Module puts around lists, dicts and tuples in its attributes.
    """
    kind: Any = type(x)
    if kind in _learned:
        return False  # an object without tensors
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    plain = next((plain for plain in (list, dict, tuple) if isinstance(x, plain)), None)
    if hasattr(kind, "__tf_flatten__"):
        flatten = lambda x: x.__tf_flatten__()[::-1]
        unflatten = lambda static, parts: kind.__tf_unflatten__(static, tuple(parts))
    elif names:
        flatten = lambda x: ([getattr(x, name) for name in names], None)
        unflatten = lambda _, parts: _with_attributes(kind, names, parts)
    elif plain and kind.__module__.startswith("tensorflow."):
        flatten, unflatten = lambda x: ([plain(x)], None), lambda _, parts: parts[0]
    else:
        return False
    optree.register_pytree_node(kind, flatten, unflatten, namespace=_NAMESPACE)
    _learned.add(kind)
    return True


def _with_attributes(kind: type, names: list[str], parts: Any) -> Any:
    """Return an object with these attributes.

    It skips `__init__`, which may check or compute.
    """
    x: Any = object.__new__(kind)
    for name, part in zip(names, parts, strict=True):
        object.__setattr__(x, name, part)  # a frozen class has a __setattr__ of its own
    return x


def _holds_no_tensor(x: Any) -> bool:
    """Return True if x is of a registered class and holds no tensor: then it is a leaf."""
    if type(x) not in _learned:
        return False
    leaves = optree.tree_leaves(x, none_is_leaf=True, namespace=_NAMESPACE)
    is_static = all(leaf is not SLOT and framework_of(leaf) is None for leaf in leaves)
    return is_static and any(leaf is not None for leaf in leaves)
