"""A host function as one operation: run at once where values are known, called by the compiled
program where not.

jax.pure_callback does the second as well. Called eagerly it compiles a program for each function,
and waits for ever if the function uses JAX itself (seen in 0.10); and it gives the function JAX's
arrays, which costs more than a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding, PartitionSpec

from cgshim.backend import (
    CustomGradientTypeError,
    TransformationError,
    describe,
    refusal,
)
from cgshim.host.backend import refuse_host_derivative
from cgshim_jax._primitives import mesh_axis, primitive
from cgshim_jax._private import callback_sharding, is_exported, lowered_each_time, type_made_of

if TYPE_CHECKING:
    from cgshim.host.backend import HostCall, Spec

Array = Any
Types = tuple[tuple[tuple[int, ...], Any], ...]
"""shapes and dtypes of the results: without 64 bits if JAX has none"""


def host_function(
    call: HostCall, inputs: Sequence[Array], declared: Sequence[Spec], /
) -> Sequence[Array]:
    for x in inputs:
        if not isinstance(x.dtype, np.dtype):
            raise refusal(CustomGradientTypeError, call.name,
                          must="a function on the host is given arrays of numbers", got=describe(x),
                          do="give it jax.random.key_data(key)")  # fmt: skip
    types = tuple(
        [(tuple(spec.shape), jax.dtypes.canonicalize_dtype(spec.dtype)) for spec in declared]
    )
    return _bound(_Runner(call), types, inputs)


class _Runner:
    """What runs a call: a parameter of the operation. As it is callable, no cache of JAX keeps it
    alive.

    JAX lowers equal operations once, and then XLA runs them once.
    """

    def __init__(self, call: HostCall) -> None:
        self.call = call

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        return self.call.run(arrays)

    def __repr__(self) -> str:
        return self.call.name

    def __hash__(self) -> int:
        return hash((self.call.function, self.call.batches))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Runner) and _is_same(self.call.key, other.call.key)
        )


def _is_same(a: Any, b: Any) -> bool:
    """Return True if no function can tell a from b; 1 and True are equal, and so are 0.0 and -0.0."""
    if type(a) is tuple and type(b) is tuple:
        return len(a) == len(b) and all(map(_is_same, a, b))
    return a is b or (type(a) is type(b) and type(a) in _COMPARED_BY_REPR and repr(a) == repr(b))


_COMPARED_BY_REPR = frozenset([bool, int, float, complex, str, bytes])


# --- The operation --------------------------------------------------------------------------------


def _bound(runner: _Runner, types: Types, operands: Sequence[Array]) -> list[Array]:
    results: list[Array] = _host.bind(*operands, runner=runner, types=types)
    return results


def _types(*operands: Any, runner: _Runner, types: Types) -> list[Any]:
    return [type_made_of(operands, shape, dtype) for shape, dtype in types]


def _run_now(*operands: Array, runner: _Runner, types: Types) -> list[Array]:
    results = _run(runner, types, list(map(_value_of, operands)))
    place = _place_of(operands)
    return [jax.device_put(y, place) for y in results]


def _value_of(x: Any) -> Any:
    """Return a NumPy array. x may be a number that stands in a jaxpr, with a dtype of its own or
    JAX's default.
    """
    return np.asarray(x, x.dtype if hasattr(x, "dtype") else jnp.asarray(x).dtype)


def _run(runner: _Runner, types: Types, arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        [y.astype(dtype, copy=False) for y, (_, dtype) in zip(runner(arrays), types, strict=True)]
    )


def _place_of(operands: Sequence[Array]) -> Any:
    """Return where results belong: where an operand was put by its owner; None if JAX may choose."""
    for x in operands:
        if getattr(x, "committed", False):
            if len(x.sharding.device_set) == 1:
                return x.sharding
            if isinstance(x.sharding, NamedSharding):
                return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None


def _batch(
    axis: Any, operands: Sequence[Array], at: Sequence[int | None], *, runner: _Runner, types: Types
) -> Any:
    batched = [i is not None for i in at]
    if not any(batched):  # JAX asks even where nothing is
        return _bound(runner, types, operands), [None] * len(types)
    over = tuple([((axis.size, *shape), dtype) for shape, dtype in types])
    first = [x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(operands, at, strict=True)]
    results = _bound(_Runner(runner.call.over(batched)), over, first)
    if mesh_axis(axis) is not None:  # a part of their types, where shardings are one
        results = [jax.sharding.reshard(y, PartitionSpec(mesh_axis(axis))) for y in results]
    return results, [0] * len(types)


def _refuse(*operands: Any, runner: _Runner, types: Types) -> NoReturn:
    refuse_host_derivative(runner.call.name)


def _lower(context: Any, *operands: Any, runner: _Runner, types: Types) -> Any:
    if is_exported(context):
        raise refusal(TransformationError, runner.call.name,
                      must="what runs on the host is a part of this process", got="jax.export",
                      do="export what comes before it and what comes after it")  # fmt: skip

    def run(*arrays: Any) -> tuple[Any, ...]:
        return _run(runner, types, arrays)

    results, _, _ = mlir.emit_python_callback(
        context, run, None, list(operands), context.avals_in, context.avals_out,
        has_side_effect=False, sharding=callback_sharding(context),
    )  # fmt: skip
    return results


_host = primitive("cgshim_host", _run_now, _types, _refuse, _batch, _lower)
ad.primitive_transposes[_host] = _refuse
if jax.default_backend() == "tpu":  # where each call has a channel of its own
    mlir.register_lowering(_host, _lower, **lowered_each_time)
