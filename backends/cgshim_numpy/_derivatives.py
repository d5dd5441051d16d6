"""NumPy: what the backend does with autograd's boxes; whoever imports this file imports autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import JVPNode, VJPNode, defjvp, register_notrace, vspace

from cgshim.backend import is_differentiable
from cgshim_numpy._arrays import BOXES, NAMESPACE, Array
from cgshim_numpy._linear import NonlinearError, depends_on_upstream, transposed as transposed_rule
from cgshim_numpy._private import (
    ArrayBox,
    DictBox,
    SequenceBox,
    getval,
    isbox,
    make_vjp,
    numpy_wrapper,
    primitive_jvps,
)
from cgshim_numpy._record import Leaf, records_of
from cgshim_numpy._run import conjugated, output_under_autograd as output_under_autograd


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if not isbox(x):
        return anp.array(x, dtype=dtype)
    if dtype is None or x.dtype == dtype:
        return x
    # autograd would take the derivative of what was cut off
    if not is_differentiable(np.dtype(dtype)):
        return stop_gradient(x).astype(dtype)
    if np.dtype(dtype).kind == "c" and x.dtype.kind != "c":
        # whose derivative takes the real part, where that of astype would warn
        return x + np.zeros((), dtype)
    return x.astype(dtype)


def convert_to_numpy(x: Array, /) -> Any:
    for record in records_of(x):
        record.note_read(x)
    return stop_gradient(x)


def stop_gradient(x: Array, /) -> Array:
    if depends_on_upstream(x):
        raise NonlinearError("a constant made of upstream")
    return np.asarray(getval(x))


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    # autograd knows no class that is derived from NumPy's array, as one in a file is
    floats = tuple([np.asarray(x) if isinstance(x, np.memmap) else x for x in inputs])

    def fn_of_floats(floats: Any) -> Any:
        # The inputs come back with the outputs: autograd warns of an output that does not depend on
        # them.
        return tuple_of_boxes(
            (tuple_of_boxes(tuple(fn(*[floats[at] for at in range(len(inputs))]))), floats)
        )

    pull_back, (outputs, _) = cast(Any, make_vjp)(fn_of_floats, floats)  # autograd has no types
    return list(outputs), lambda upstreams: list(
        pull_back((tuple(upstreams), vspace(floats).zeros()))
    )


def vjp_of_rules(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    """Do as vjp does, with conjugates as rules have them."""
    outputs, pullback = vjp(fn, inputs)
    return outputs, lambda upstreams: conjugated(pullback(conjugated(upstreams)))


def transposed(
    fn: Callable[..., Sequence[Array]],
    inputs: Sequence[Array],
    upstreams: Sequence[Array],
    refuse: Callable[[str], NoReturn],
) -> Sequence[Array]:
    """Return the transpose of a linear function at upstreams, conjugates as rules have them."""
    values = tuple(map(getval, inputs))
    of_tuple = lambda tangents: fn(*[tangents[at] for at in range(len(values))])
    gradients = transposed_rule(of_tuple, values, conjugated(upstreams), refuse)
    return conjugated([gradients[at] for at in range(len(values))])


# --- What the other half does with boxes from now on ----------------------------------------------

if numpy_wrapper._astype not in primitive_jvps:  # autograd has its derivative in reverse mode alone
    defjvp(numpy_wrapper._astype, "same")

LIMITS: list[str] = []
"""what only newer versions of autograd can"""

# from autograd 1.9 on a box of Python's float has these, and these functions take boxes
if not hasattr(ArrayBox, "__array_ufunc__"):
    LIMITS.append(
        "second orders and forward mode are refused where f or its rule calls NumPy's own functions (np.sin), and not "
        "those of autograd.numpy or cgshim.ops (from autograd 1.9 on it is as documented)"
    )
    for _name, _of in {
        "shape": np.shape,
        "ndim": np.ndim,
        "size": np.size,
        "dtype": np.result_type,
    }.items():
        setattr(ArrayBox, _name, property(functools.partial(lambda of, box: of(getval(box)), _of)))
    for _function in map(functools.partial(getattr, numpy_wrapper), ("empty_like", "full_like")):
        register_notrace(VJPNode, _function)
        register_notrace(JVPNode, _function)


def _opened(box: Any) -> tuple[list[Any], None]:
    """Return a container with a box for each item, instead of one box for all."""
    if isinstance(box, DictBox):
        return [{key: box[key] for key in box}], None
    return [type(getval(box))([box[at] for at in range(len(box))])], None


for _kind in (DictBox, SequenceBox):
    optree.register_pytree_node(
        cast(Any, _kind), _opened, lambda _, content: next(iter(content)), namespace=NAMESPACE
    )
BOXES.update([ArrayBox, Leaf])
