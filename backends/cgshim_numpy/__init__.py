"""NumPy, with the gradients of HIPS autograd.

A call that nothing differentiates is plain NumPy (`_plain.py`). Under autograd it is one primitive (`_outputs.py`), in
which f runs on values (`_run.py`), and whose derivative calls the rule on values (`_rule.py`). If outer derivatives
look on, f runs once all the same, on values that record what is made of them (`_record.py`, `_recorded_run.py`):
whatever the rule reads is a function of the arguments at each level that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.extend import vspace

from cgshim_numpy._arrays import Array, is_complex, without_file
from cgshim_numpy._arrays import is_tensor as is_tensor
from cgshim_numpy._boxes import has_box
from cgshim_numpy._linear import NonlinearError, depends_on_upstream
from cgshim_numpy._outputs import output_under_autograd
from cgshim_numpy._plain import plan as plan
from cgshim_numpy._private import getval, isbox, make_vjp, trace_stack
from cgshim_numpy._record import is_recorded, records_of, stopped
from cgshim_numpy._trees import tree_flatten as tree_flatten
from cgshim_numpy._trees import tree_unflatten as tree_unflatten

if TYPE_CHECKING:
    from cgshim.backend import Call, HostCall, Spec


def convert_to_tensor(x: Any, /, dtype: Any = None) -> Array:
    if not isbox(x):
        return anp.array(x, dtype=dtype) if any(map(isbox, optree.tree_leaves(x))) else np.asarray(x, dtype=dtype)
    if dtype is None or x.dtype == dtype:
        return x
    if np.dtype(dtype).kind == "c" and not is_complex(x):
        return x + np.zeros((), dtype)  # whose derivative takes the real part, where that of astype would warn
    return x.astype(dtype)


def convert_to_numpy(x: Array, /) -> Any:
    if depends_on_upstream(x):
        raise NonlinearError("a constant made of upstream")
    if is_recorded(x):
        for record in records_of(x):
            record.note_read()
    return np.asarray(getval(x))


def stop_gradient(x: Array, /) -> Array:
    return stopped(x) if is_recorded(x) else convert_to_numpy(x)


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_numpy._functions import numpy_function

    return numpy_function(name)


def host_function(call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /) -> list[Array]:
    return call.run([*map(convert_to_numpy, inputs)])


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Any:
    if trace_stack.top < 0 and not has_box(inputs):  # nothing is being differentiated
        return call.output_of(inputs)
    return output_under_autograd(call, inputs)


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array]]]:
    floats = tuple(map(without_file, inputs))

    def fn_of_floats(floats: Any) -> Any:
        # The inputs come back with the outputs: autograd warns of an output that does not depend on them.
        return tuple_of_boxes((tuple_of_boxes(tuple(fn(*[floats[at] for at in range(len(inputs))]))), floats))

    pull_back, (outputs, _) = cast(Any, make_vjp)(fn_of_floats, floats)  # autograd has no types

    def pullback(upstreams: Sequence[Array]) -> list[Array]:
        return list(pull_back((tuple(upstreams), vspace(floats).zeros())))

    return list(outputs), pullback
