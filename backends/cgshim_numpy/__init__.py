"""NumPy, with the gradients of HIPS autograd.

A call that nothing differentiates is plain NumPy (`_plain.py`). Under autograd it is one primitive (`_run.py`): f runs
on values, and the derivative calls its rule on values. If outer derivatives look on, f runs once all the same, on
values that record what is made of them (`_record.py`): whatever the rule reads is a function of the arguments at each
level that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import vspace

from cgshim.backend import Call, HostCall, Spec
from cgshim_numpy._arrays import Array
from cgshim_numpy._arrays import is_tensor as is_tensor
from cgshim_numpy._arrays import tree_flatten as tree_flatten
from cgshim_numpy._arrays import tree_unflatten as tree_unflatten
from cgshim_numpy._functions import numpy_function as numpy_function
from cgshim_numpy._linear import NonlinearError, depends_on_upstream
from cgshim_numpy._plain import plan as plan
from cgshim_numpy._private import box_types, getval, isbox, make_vjp, trace_stack
from cgshim_numpy._record import records_of
from cgshim_numpy._run import output_under_autograd


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if not isbox(x):
        return anp.array(x, dtype=dtype) if any(map(isbox, optree.tree_leaves(x))) else np.asarray(x, dtype=dtype)
    if dtype is None or x.dtype == dtype:
        return x
    if np.dtype(dtype).kind == "c" and x.dtype.kind != "c":
        return x + np.zeros((), dtype)  # whose derivative takes the real part, where that of astype would warn
    return x.astype(dtype)


def convert_to_numpy(x: Array, /) -> Any:
    for record in records_of(x):
        record.note_read(x)
    return stop_gradient(x)


def stop_gradient(x: Array, /) -> Array:
    if depends_on_upstream(x):
        raise NonlinearError("a constant made of upstream")
    return np.asarray(getval(x))


def host_function(call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if trace_stack.top < 0 and box_types.isdisjoint(map(type, inputs)):  # nothing is being differentiated
        return call.output_of(inputs)
    return output_under_autograd(call, inputs)


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    # autograd knows no class that is derived from NumPy's array, as one in a file is
    floats = tuple([np.asarray(x) if isinstance(x, np.memmap) else x for x in inputs])

    def fn_of_floats(floats: Any) -> Any:
        # The inputs come back with the outputs: autograd warns of an output that does not depend on them.
        return tuple_of_boxes((tuple_of_boxes(tuple(fn(*[floats[at] for at in range(len(inputs))]))), floats))

    pull_back, (outputs, _) = cast(Any, make_vjp)(fn_of_floats, floats)  # autograd has no types
    return list(outputs), lambda upstreams: list(pull_back((tuple(upstreams), vspace(floats).zeros())))
