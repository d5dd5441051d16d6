"""NumPy, with the gradients of HIPS autograd.

Arrays that are not being differentiated are plain NumPy, before and after f. Under autograd, f runs on the values
inside one primitive, whose derivative is the rule's: see `cgshim_numpy._run.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import optree
from autograd import numpy as anp
from autograd.builtins import tuple as tuple_of_boxes
from autograd.core import make_vjp
from autograd.extend import vspace
from autograd.tracer import getval, isbox, trace_stack

from cgshim_numpy._boxes import Array, is_complex, is_float, plain
from cgshim_numpy._boxes import is_tensor as is_tensor
from cgshim_numpy._boxes import tree_flatten as tree_flatten
from cgshim_numpy._boxes import tree_unflatten as tree_unflatten
from cgshim_numpy._linear import NonlinearError, depends_on_upstream
from cgshim_numpy._run import Run, outputs_of

if TYPE_CHECKING:
    from cgshim._call import Call


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
    return np.asarray(getval(x))


def stop_gradient(x: Array, /) -> Array:
    return convert_to_numpy(x)


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    from cgshim_numpy._functions import numpy_function

    return numpy_function(name)


def custom_gradient(call: Call, inputs: Sequence[Array], /) -> Sequence[Array]:
    if trace_stack.top < 0:  # nothing is being differentiated
        return call(inputs)[0]
    run = Run(call, inputs)
    if not any(map(isbox, (*inputs, *run.variables))):
        return run.on_constants(inputs)
    return run.outputs_at(outputs_of(run, *inputs, *run.variables))


def vjp(
    fn: Callable[..., Sequence[Array]], inputs: Sequence[Array], /
) -> tuple[Sequence[Array], Callable[[Sequence[Array]], Sequence[Array | None]]]:
    inputs = [*map(plain, inputs)]
    at_floats = [at for at, x in enumerate(inputs) if is_float(x)]

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
