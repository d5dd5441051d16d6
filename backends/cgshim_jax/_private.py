"""All that cgshim uses of JAX beyond its documentation, each with its purpose and the versions that
it was seen in.
"""

# ruff: noqa: I001  # one import a module, with a comment for each name

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax._src import api
from jax._src.callback import (
    _callback_op_sharding,  # where a compiled program calls the host: 0.4 to 0.12
)
from jax._src.checkify import (
    checkify_jaxpr as checkify_jaxpr,  # what checkify does with a function: 0.4 to 0.12
    error_checks as error_checks,  # what it does with each primitive: 0.4 to 0.12
)
from jax._src.core import (
    EvalTrace as EvalTrace,  # operations that run at once: 0.4.36 to 0.12
    Trace as Trace,  # what is done with operations: 0.4 to 0.12
    set_current_trace as set_current_trace,  # until a block ends: 0.4.36 to 0.12
    trace_ctx as trace_ctx,  # the current trace: 0.4.36 to 0.12
    unmapped_aval as unmapped_aval,  # the type of a batch, with its sharding: 0.4 to 0.12
)
from jax._src.interpreters import ad
from jax._src.interpreters.ad import (
    JVPTrace as JVPTrace,  # forward mode: 0.4 to 0.12
    LinearizeTrace as LinearizeTrace,  # reverse mode: 0.4.36 to 0.12
    primitive_linearizations as primitive_linearizations,  # an operation's derivative in it: 0.4.38 to 0.12
)
from jax._src.interpreters.batching import BatchTrace as BatchTrace  # vmap: 0.4 to 0.12

# reverse mode before 0.7: 0.4 to 0.12
from jax._src.interpreters.partial_eval import JaxprTrace as JaxprTrace
from jax import api_util
from jax.extend.linear_util import wrap_init as wrap_init  # with debug_info: 0.5 to 0.12
from jax.interpreters import mlir, partial_eval

# Whether types tell over which devices of a shard_map values vary (0.6 to 0.12). Before, a
# shard_map refuses operations that it does not know.
types_tell_devices = any(hasattr(jax.core.ShapedArray, name) for name in ("mat", "vma"))

# Whether a rule of primitive_linearizations also returns residuals in a tree, since 0.11.1; ours
# have none.
has_structured_residuals = jax.__version_info__ >= (0, 11, 1)

# What a compiled function has as `inline` if nobody asks for that: a member of an enumeration, since
# 0.11.
not_inlined: Any = getattr(getattr(api, "Inline", None), "AUTO", False)

# How many arguments come before the error in checkify's functions: a context, since 0.11.
checkify_contexts = int("ctx" in inspect.signature(checkify_jaxpr).parameters)

# What has JAX lower an operation wherever it is, rather than look for an equal one: 0.8 to 0.12.
lowered_each_time = (
    {"cacheable": False}
    if "cacheable" in inspect.signature(mlir.register_lowering).parameters
    else {}
)

# How a compiled program calls a jaxpr, which need not be traced again: 0.4 to 0.10. Without it, it
# is traced.
core_call_lowering: Any = getattr(mlir, "core_call_lowering", None)

# What JAX can transpose, beside ad.primitive_transposes: seen in 0.10.
fancy_transposes: Any = getattr(ad, "fancy_transposes", {})

# What is within jax.make_jaxpr, with wrap_init, at half its time: 0.5 to 0.12. Without these names
# jax.make_jaxpr serves.
debug_info: Any = getattr(api_util, "debug_info", None)
trace_to_jaxpr_dynamic: Any = getattr(partial_eval, "trace_to_jaxpr_dynamic", None)


def lower_in_kernels(primitive: Any, evaluate: Callable[..., Any]) -> None:
    """Let Pallas lower an operation for TPUs, if a kernel is being traced: 0.8 to 0.12."""
    core = sys.modules.get("jax._src.pallas.core")
    if getattr(getattr(core, "_pallas_tracing_env", None), "grid_context", None) is None:
        return
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.pallas.mosaic import lowering

        lowering.register_lowering_rule(primitive)(lowering.lower_fun(evaluate))


def parts_of_scan(
    parameters: Any, operands: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the constants, what is carried and what is scanned, among the operands of a scan: 0.4
    to 0.12.
    """
    if "ft_in" in parameters:  # since 0.11
        return parameters["ft_in"].update(operands).unpack()  # type: ignore[no-any-return]
    constants_end = parameters["num_consts"]
    carry_end = constants_end + parameters["num_carry"]
    return operands[:constants_end], operands[constants_end:carry_end], operands[carry_end:]


def callback_sharding(context: Any) -> Any:
    """Return where a call of the host, which is being lowered, is made: on one device, or on each
    in a shard_map.
    """
    arguments = context.module_context.axis_context, None, context.avals_out
    return _callback_op_sharding(
        *arguments[: len(inspect.signature(_callback_op_sharding).parameters)]
    )


def is_exported(context: Any) -> bool:
    """Return True if what is being lowered is for jax.export: seen in 0.4.38 to 0.12; without it
    JAX refuses later.
    """
    return getattr(
        getattr(context.module_context, "lowering_parameters", None), "for_export", False
    )


def type_made_of(operands: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the type of a tensor that is made of operands of these types: where they are sharded,
    it is not.

    In a shard_map it varies over the devices over which one of them does: 0.6 to 0.12.
    """
    like = next((x for x in operands if types_tell_devices and not x.sharding.mesh.empty), None)
    if like is None:
        return jax.core.ShapedArray(shape, dtype)
    varying: frozenset[Any] = frozenset().union(*map(varies_over, operands))
    sharding = like.sharding.update(spec=(None,) * len(shape))
    whole = like.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding)
    return varying_over(whole, varying)


def varies_over(kind: Any) -> frozenset[Any]:
    """Return the mesh axes of a shard_map over which values of this type differ: 0.6 to 0.12."""
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def varying_over(kind: Any, axes: frozenset[Any]) -> Any:
    """Return the type of values that differ over these mesh axes of a shard_map: 0.6 to 0.12."""
    if hasattr(kind, "mat"):
        return kind.update(manual_axis_type=type(kind.mat)(varying=axes))
    return kind.update(vma=axes)


def varied(x: Any, axes: tuple[Any, ...]) -> Any:
    """Return a value that is the same over these mesh axes of a shard_map as one that may differ:
    by pvary before 0.10, by pcast in 0.10 to 0.12.
    """
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)
