"""TensorFlow: a rule on tapes, in graphs and in forward mode, over tensors alone; what is static is bound outside."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import optree
import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.framework.weak_tensor import WeakTensor
from tensorflow.python.trackable.data_structures import ListWrapper, _DictWrapper, _TupleWrapper

from cgshim._backend import framework_of
from cgshim._tree import SLOT
from cgshim_tensorflow._captured import run
from cgshim_tensorflow._fits import fit_of, fit_of_dense
from cgshim_tensorflow._gradient import attach_rule, unfollowed
from cgshim_tensorflow._origins import differentiated, in_this_graph
from cgshim_tensorflow._values import is_composite, is_differentiable, values_of, with_values

if TYPE_CHECKING:
    from cgshim._call import Call

Tensor = Any


def is_tensor(x: object, /) -> bool:
    return isinstance(x, _TENSORS)  # tf.is_tensor is true of a Keras Variable too


_TENSORS = (tf.Tensor, tf.Variable, WeakTensor, tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def tree_flatten(tree: Any, /) -> tuple[list[Any], Any]:
    is_leaf = _is_configuration if _learned else None
    leaves, structure = optree.tree_flatten(tree, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if any(_learn(type(leaf)) for leaf in leaves):
        return tree_flatten(tree)
    return leaves, structure


def tree_unflatten(structure: Any, leaves: Sequence[Any], /) -> Any:
    return optree.tree_unflatten(structure, leaves)


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Tensor:
    dtype = None if dtype is None else tf.as_dtype(dtype)
    if hasattr(x, "dtype"):  # a tensor or an array is cast; a number is read in its dtype at once
        x = x if is_composite(x) else tf.convert_to_tensor(x)
        return x if dtype in (None, x.dtype) else tf.cast(x, dtype)
    return tf.convert_to_tensor(x, dtype)


def convert_to_numpy(x: Tensor, /) -> Any:
    x = tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x
    return x.numpy() if isinstance(x, tf.RaggedTensor) else tf.convert_to_tensor(x).numpy()


def stop_gradient(x: Tensor, /) -> Tensor:
    return with_values(x, tf.stop_gradient(values_of(x)))


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_tensorflow._control import control_function
    from cgshim_tensorflow._numpy import numpy_function

    space, _, own = name.rpartition(".")
    return control_function(own) if space == "lax" else numpy_function(name)


def custom_gradient(call: Call, inputs: Sequence[Tensor], /) -> Sequence[Tensor]:
    follow = _autograph()
    call.f = follow(call.f)
    given = [in_this_graph(x) for x in inputs]
    tensors = [unfollowed(x) for x in given] if call.once_differentiable else given
    ran = run(call, tensors, inputs)
    sources = [*map(values_of, given), *map(tf.convert_to_tensor, ran.variables), *ran.unknown]
    return attach_rule(call, ran, tensors, sources, follow)


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor | None]]]:
    values = [tf.identity(values_of(x)) for x in inputs]  # a tensor that is given twice has two gradients
    watched = [value for value in values if is_differentiable(value)]
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape, differentiated(values):
        tape.watch(watched)
        outputs = list(fn(*map(with_values, inputs, values)))

    fits = [fit_of(output) or fit_of_dense(output.shape, output.dtype) for output in outputs]

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor | None]:
        fitting: list[Any] = [
            fit.values(u, "op_vjp", lambda: "the output") for fit, u in zip(fits, upstreams, strict=True)
        ]
        pairs = zip(map(values_of, outputs), map(tf.convert_to_tensor, fitting), strict=True)
        used = [(value, upstream) for value, upstream in pairs if is_differentiable(value)]
        gradients = tape.gradient(
            [value for value, _ in used], watched, output_gradients=[upstream for _, upstream in used],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )  # fmt: skip
        found = iter(gradients)
        return [
            with_values(x, tf.convert_to_tensor(next(found))) if is_differentiable(value) else None
            for x, value in zip(inputs, values, strict=True)
        ]

    return outputs, pullback


def tracing_type(op: Any) -> Any:
    """What tf.function knows an op by that is one of its arguments: itself, and a method by what it is bound to."""
    is_method = hash(op) != object.__hash__(op)
    return default_types.Literal(op) if is_method else default_types.Weakref(weakref.ref(op))


def _autograph() -> Callable[[Any], Any]:
    """What converts a function as AutoGraph converts its caller, so that `if` and `while` on tensors work in it."""
    if tf.executing_eagerly():
        return lambda function: function
    autograph = tf.__internal__.autograph
    return functools.partial(autograph.tf_convert, ctx=autograph.control_status_ctx())


# --- Containers that `tf.nest` knows and optree does not ---------------------------------------------------------

_NAMESPACE = "cgshim.tensorflow"
_learned: set[type] = set()
"""the classes with `__tf_flatten__`, and those of attrs, that were met"""


def _register(kind: Any, apart: Callable[[Any], Any], together: Callable[[Any, Any], Any]) -> None:
    optree.register_pytree_node(kind, apart, together, namespace=_NAMESPACE)


for _wrapper, _plain in ((ListWrapper, list), (_DictWrapper, dict), (_TupleWrapper, tuple)):  # attributes of tf.Module
    _register(_wrapper, lambda x, plain=_plain: ([plain(x)], None), lambda _, leaves: next(iter(leaves)))  # type: ignore[misc]


def _learn(kind: Any) -> bool:
    """Register a class with `__tf_flatten__`, or one of attrs; False for what is a leaf indeed."""
    if kind in _learned:
        return False  # an object that is configuration
    names = [field.name for field in getattr(kind, "__attrs_attrs__", ())]
    if hasattr(kind, "__tf_flatten__"):
        apart: Callable[[Any], Any] = lambda x: x.__tf_flatten__()[::-1]
        together: Callable[[Any, Any], Any] = lambda static, parts: kind.__tf_unflatten__(static, tuple(parts))
    elif names:
        apart = lambda x: ([getattr(x, name) for name in names], None)
        together = lambda _, parts: _with_attributes(kind, zip(names, parts, strict=True))
    else:
        return False
    _register(kind, apart, together)
    _learned.add(kind)
    return True


def _with_attributes(kind: type, attributes: Iterable[tuple[str, Any]]) -> Any:
    """An object with these attributes: it was made before, and what its class does then to them has been done."""
    x: Any = object.__new__(kind)
    for name, value in attributes:
        object.__setattr__(x, name, value)  # a frozen class has a __setattr__ of its own
    return x


def _is_configuration(x: Any) -> bool:
    """Whether x is of a class that was learned, and holds no tensor: it passes through as it is."""
    if type(x) not in _learned:
        return False
    leaves = optree.tree_leaves(x, none_is_leaf=True, namespace=_NAMESPACE)
    static = [leaf for leaf in leaves if leaf is not SLOT and framework_of(leaf) is None]
    return len(static) == len(leaves) and any(leaf is not None for leaf in leaves)
