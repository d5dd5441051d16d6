"""NumPy: forward mode, as the transpose of a rule, which has to be seen to be linear in upstream.

The rule is traced as for any derivative in reverse mode, with nodes that look at each operation as
it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import optree
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import VJPNode, VSpace, register_notrace, vspace
from autograd.numpy import fft, linalg

from cgshim_numpy._private import (
    ArrayBox,
    _make_dict,
    backward_pass,
    container_take,
    container_untake,
    func,
    getval,
    make_sequence,
    numpy_vjps,
    numpy_wrapper,
    sequence_extend_left,
    sequence_extend_right,
    sparse_add,
    trace,
    trace_primitives_map,
)  # fmt: skip
from cgshim_numpy._record import nodes_of

anp: Any = numpy_wrapper  # autograd makes its functions in there, where no type checker looks


class NonlinearError(Exception):
    """A rule does with its upstream gradient what is not linear; the message says what."""


class UpstreamNode(VJPNode):  # type: ignore[misc]  # autograd has no types
    """A node of what is computed from upstream: made for linear operations alone."""

    __slots__ = ()

    def __init__(
        self,
        value: Any,
        fun: Any,
        args: Sequence[Any],
        kwargs: Any,
        parent_argnums: Sequence[int],
        parents: Any,
    ) -> None:
        _require_linear(fun, args, kwargs, parent_argnums)
        super().__init__(value, fun, args, kwargs, parent_argnums, parents)


def depends_on_upstream(x: Any) -> bool:
    """Return True if x is a function of the upstream gradient of a rule that is being transposed."""
    return any(type(node) is UpstreamNode for node in nodes_of(x))


def transposed(
    rule: Callable[[Any], Sequence[Any]], output: Any, tangents: Sequence[Any],
    refuse: Callable[[str], NoReturn],
) -> Any:  # fmt: skip
    """Return the gradient of <rule(upstream), tangents> by upstream, which has the structure of
    output.

    The transpose of a linear rule is the same everywhere. It is taken at a point other than zero,
    where constants and upstream differ. A rule that is not linear may still not show it in its
    operations: so the rule is also asked at -2 times the point, and has to give -2 times the
    gradients. What is not linear in it is refused.
    """

    def gradients_and_upstream(upstream: Any) -> Any:
        # The upstream comes back with the gradients: autograd warns of an output that does not
        # depend on it.
        return tuple_of_boxes((tuple_of_boxes(tuple(rule(upstream))), upstream))

    point = _numbers_like(getval(output), 1.0)
    try:
        gradients, end = trace(UpstreamNode.new_root(), gradients_and_upstream, point)
        _require_homogeneous(getval(gradients)[0], rule(_numbers_like(point, -2.0)))
    except NonlinearError as error:
        refuse(str(error))
    return backward_pass(
        tuple_of_boxes((tuple_of_boxes(tuple(tangents)), vspace(output).zeros())), end
    )


def _numbers_like(x: Any, scale: float) -> Any:
    """Return numbers other than zero, in the place of the floats of x."""
    if isinstance(x, tuple):
        return tuple(_numbers_like(each, scale) for each in x)
    if x.dtype.kind not in "fc":
        return np.zeros(x.shape, x.dtype)
    return (scale * np.cos(np.arange(x.size))).reshape(x.shape).astype(x.dtype)


def _require_homogeneous(at_point: Sequence[Any], at_minus_twice: Sequence[Any]) -> None:
    for once, other in zip(map(getval, at_point), map(getval, at_minus_twice), strict=True):
        if np.array_equal(other, -2.0 * once):  # as all that multiplies and adds
            continue
        size = np.max(np.abs(other), initial=0.0, where=np.isfinite(other))
        if not np.allclose(other, -2.0 * once, rtol=0.0, atol=_TOLERANCE * size, equal_nan=True):
            raise NonlinearError("a gradient that is not proportional to upstream")


# of the largest number: a linear rule may be a solver that stops early, or in 16 bits
_TOLERANCE = 1e-3


# --- Which operations are linear, and in what -----------------------------------------------------


def _named(module: Any, names: str) -> set[Any]:
    return {getattr(module, name) for name in names.split() if hasattr(module, name)}


# Linear in each argument while the others are constant: u * u is not.
_IN_EACH = (
    _named(anp, "multiply matmul dot tensordot outer inner einsum kron cross")
    | _named(numpy_vjps, "dot_adjoint_0 dot_adjoint_1 tensordot_adjoint_0 tensordot_adjoint_1")
    | {func(VSpace.scalar_mul), func(VSpace.inner_prod)}
)

# Linear in all arguments together, but for the first few, which say how to join.
# With a constant that is not zero, affine.
_IN_ALL = {
    **dict.fromkeys([*_named(anp, "add subtract"), sequence_extend_left, sequence_extend_right], 0),
    **dict.fromkeys([anp.concatenate_args, make_sequence, _make_dict, sparse_add], 1),
    **dict.fromkeys([func(VSpace.add), func(VSpace.mut_add)], 1),
    anp.array_from_args: 2,
    # anp.where is a function around it from autograd 1.9 on
    trace_primitives_map.get(np.where, anp.where): 1,
}

# Linear in one argument: the first of these, and that at this place of others.
_IN_FIRST = (
    _named(
        anp,
        "divide true_divide negative positive reshape roll array_split split vsplit hsplit dsplit ravel expand_dims"
        " squeeze diag diagonal make_diagonal flipud fliplr rot90 trace triu tril swapaxes rollaxis moveaxis"
        " broadcast_to real imag conj conjugate diff gradient repeat tile transpose sum mean _primitive_mean cumsum"
        " atleast_1d atleast_2d atleast_3d rad2deg degrees deg2rad radians",
    )
    | _named(
        fft,
        "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn fftshift ifftshift",
    )
    | {numpy_vjps.untake, func(ArrayBox.__getitem__), container_take, container_untake}
)

_IN_ONE = {
    **dict.fromkeys(_IN_FIRST, 0),
    vars(linalg)["solve"]: 1,
    anp.full: 1,
    anp._array_from_scalar_or_array: 2,
    func(VSpace.covector): 1,
}

for _function in _named(
    anp, "ndim shape size result_type isscalar iscomplexobj zeros_like ones_like empty_like"
):
    register_notrace(UpstreamNode, _function)  # which are not functions of the numbers in an array


def _require_linear(fun: Any, args: Sequence[Any], kwargs: Any, places: Sequence[int]) -> None:
    if fun in _IN_EACH:
        linear = len(places) == 1
    elif fun in _IN_ALL:
        joined = range(_IN_ALL[fun], len(args))
        constants: Any = [args[at] for at in joined if at not in places]
        if any(np.any(getval(x)) for x in optree.tree_leaves(constants)):
            raise NonlinearError("a constant beside upstream")
        linear = set(places) <= {*joined}
    elif fun in _IN_ONE:
        linear = tuple(places) == (_IN_ONE[fun],)
    elif fun is anp._astype:
        linear = np.dtype(kwargs.get("dtype", args[1] if len(args) > 1 else float)).kind in "fc"
    elif fun is anp.pad:
        mode = kwargs.get("mode", args[2] if len(args) > 2 else "constant")
        linear = mode == "constant" and not np.any(kwargs.get("constant_values", 0))
    else:
        # of a function that the author made a primitive, the promise speaks
        linear = not _is_of_a_library(fun)
    if not linear:
        raise NonlinearError(f"{getattr(fun, '__name__', fun)} of upstream")


def _is_of_a_library(fun: Any) -> bool:
    """Return True if a primitive is NumPy's or autograd's own: the linear ones among these are
    listed above.
    """
    raw = getattr(fun, "fun", fun)
    of_library = ("numpy", "autograd.numpy", "autograd.builtins")
    return isinstance(raw, np.ufunc) or str(getattr(raw, "__module__", None)).startswith(of_library)
