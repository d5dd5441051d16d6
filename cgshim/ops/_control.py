"""Loops and branches with jax.lax's signatures; Python's own where a framework has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from cgshim._dispatch import backend_or_numpy
from cgshim._errors import describe_tree
from cgshim._foreign import converted_as_caller, not_converted
from cgshim._pytree import with_leaves
from cgshim.backend import (
    Backend,
    CustomGradientTypeError,
    CustomGradientValueError,
    describe,
    refusal,
)
from cgshim.ops._numpy import ops, own_function
from cgshim.ops._tensors import tree_map

Tree = Any
T = TypeVar("T")


@not_converted
def cond(pred: Any, true_fun: Callable[..., T], false_fun: Callable[..., T], *operands: Any) -> T:
    """Return ``true_fun(*operands)`` if pred, else ``false_fun(*operands)``.

    Parameters
    ----------
    pred : tensor or bool
        One boolean.
    true_fun, false_fun : callable
        Take the operands, and return trees of the same structure, shapes and dtypes.
    *operands
        Trees of tensors of any shape and dtype.

    Returns
    -------
    tree
        The result of the chosen function. ``jax.jit`` and ``tf.function`` trace both and run one.

    Examples
    --------
    >>> import numpy as np
    >>> cond(True, lambda x: 2 * x, lambda x: -x, np.array([3.0]))
    array([6.])

    Notes
    -----
    The signature follows ``jax.lax.cond``.
    """
    backend = backend_or_numpy([pred, *operands])
    own = own_function(backend, "lax.cond")
    true_fun, false_fun = (converted_as_caller(backend, fun) for fun in (true_fun, false_fun))
    if own is not None:
        return own(pred, true_fun, false_fun, *operands)  # type: ignore[no-any-return]
    return true_fun(*operands) if pred else false_fun(*operands)


@not_converted
def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Tree
) -> Tree:
    """Apply ``body_fun`` to a value while ``cond_fun`` of it is true, and return the last value.

    Parameters
    ----------
    cond_fun : callable
        Takes a value, and returns one boolean.
    body_fun : callable
        Takes a value, and returns the next, of the same structure, shapes and dtypes.
    init_val : tree of tensors or numbers

    Returns
    -------
    tree
        The first value for which cond_fun is false.

    Raises
    ------
    CustomGradientTypeError
        If body_fun returns another structure, shape or dtype than it gets.

    Examples
    --------
    >>> import numpy as np
    >>> while_loop(lambda x: x < 100.0, lambda x: 2.0 * x, np.array([3.0]))
    array([192.])

    Notes
    -----
    The signature follows ``jax.lax.while_loop``. JAX has no reverse mode for it.
    """
    backend = backend_or_numpy([init_val])
    value = with_leaves(backend, backend.convert_to_tensor, init_val)
    own = own_function(backend, "lax.while_loop")
    cond_fun, body_fun = (converted_as_caller(backend, fun) for fun in (cond_fun, body_fun))
    body = _keeping("op_while_loop", "the value of body_fun", backend, body_fun)
    if own is not None:
        return own(cond_fun, body, value)
    while cond_fun(value):
        value = body(value)
    return value


@not_converted
def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Tree,
    xs: Tree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Tree, Tree]:
    """Return the last carry and the stacked ``y`` of ``carry, y = f(carry, x)`` along xs.

    Parameters
    ----------
    f : callable
        ``f(carry, x) -> (carry, y)``; the carry keeps its structure, shapes and dtypes.
    init : tree of tensors or numbers
        The first carry.
    xs : tree of tensors, optional
        All with a first axis of the same size, at least 1; x is one element along it.
    length : int, optional
        The number of steps, if there are no xs; x is then None.
    reverse : bool
        Go from the last x to the first; each y stands at its x's place.
    unroll : int or bool
        How many steps JAX writes out in one turn of its loop, or True for all. Other backends
        ignore it.

    Returns
    -------
    tuple
        The last carry, and a tree as y whose tensors are stacked along a new first axis.

    Raises
    ------
    CustomGradientTypeError
        If f returns no pair, or a carry of another structure, shape or dtype; or if unroll is no
        number of steps.
    CustomGradientValueError
        If the sizes of the first axes differ, or there is no step at all.

    Examples
    --------
    >>> import numpy as np
    >>> scan(lambda total, x: (total + x, 10 * total), np.zeros(1), np.array([[1.0], [2.0], [3.0]]))
    (array([6.]), array([[ 0.],
           [10.],
           [30.]]))

    Notes
    -----
    The signature follows ``jax.lax.scan``.
    """
    if not isinstance(unroll, int) or (unroll < 1 and unroll is not False):
        raise refusal(CustomGradientTypeError, "op_scan",
                      must="unroll must be a bool or a number of steps, at least 1",
                      got=repr(unroll), do="leave it out, it changes no number")  # fmt: skip
    backend = backend_or_numpy([init, xs])
    carry = with_leaves(backend, backend.convert_to_tensor, init)
    steps = _steps(backend, xs, length)
    own = own_function(backend, "lax.scan")
    step = _keeping("op_scan", "the carry of f", backend, converted_as_caller(backend, f))
    if own is not None:
        return own(step, carry, xs, steps, reverse, unroll)  # type: ignore[no-any-return]
    outputs = []
    for at in reversed(range(steps)) if reverse else range(steps):
        carry, y = step(carry, tree_map(lambda x, at=at: x[at], xs))
        outputs.append(y)
    if reverse:
        outputs.reverse()
    return carry, tree_map(lambda *ys: ops.stack(ys), *outputs)


def _keeping(op: str, what: str, backend: Backend, body: Callable[..., Any]) -> Callable[..., Any]:
    """Check that body returns a value, or a first item, of the same kind as its first argument."""

    def checked(value: Tree, *rest: Any) -> Any:
        result = body(value, *rest)
        if rest and not (isinstance(result, tuple) and len(result) == 2):
            raise refusal(CustomGradientTypeError, op, must="f must return a pair (carry, y)",
                          got=describe(result), do="return y = None for none")  # fmt: skip
        following = with_leaves(backend, backend.convert_to_tensor, result[0] if rest else result)
        if _kind(backend, following) != _kind(backend, value):
            raise refusal(CustomGradientTypeError, op,
                          must=f"{what} must keep its structure, shapes and dtypes ({describe_tree(value)})",
                          got=describe_tree(following),
                          do="cast or reshape it, or begin with another one")  # fmt: skip
        return (following, *result[1:]) if rest else following

    return checked


def _kind(backend: Backend, tree: Tree) -> Any:
    leaves, structure = backend.tree_flatten(tree)
    return structure, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]


def _steps(backend: Backend, xs: Tree, length: int | None) -> Any:
    sizes = {leaf.shape[0] for leaf in backend.tree_flatten(xs)[0] if backend.is_tensor(leaf)}
    sizes |= {length} - {None}
    if len(sizes) != 1 or not all(size is None or size > 0 for size in sizes):
        raise refusal(CustomGradientValueError, "op_scan",
                      must="xs and length must tell one number of steps, at least 1",
                      got=f"{sorted(sizes, key=str)}",
                      do="give tensors with first axes of one size, or a length")  # fmt: skip
    return sizes.pop()
