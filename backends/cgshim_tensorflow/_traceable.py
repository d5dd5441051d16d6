"""A look at whether a rule reads the values of its tensors in Python, in a host function or in an `if`.

TensorFlow tells of the operations of a rule, but not of what the rule reads in Python. So the rule is traced: in a
graph there is no value to read. It is traced once for all calls that differ in nothing but the values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from cgshim.backend import convert_closure
from cgshim_tensorflow._fingerprint import fingerprint
from cgshim_tensorflow._private import FuncGraph, dismantle_func_graph

Tensor = Any
Function = Callable[..., Any]
IsTensor = Callable[[Any], bool]


def reads_no_values(
    apply: Callable[..., Any],
    grad_fn: Function,
    inputs: Sequence[Tensor],
    upstreams: Sequence[Tensor],
    is_tensor: IsTensor,
) -> bool:
    """Return True if `apply(grad_fn, inputs, *upstreams)`, which runs the rule, can be traced."""
    key = fingerprint([grad_fn, *inputs, *upstreams], is_tensor)
    if key is not None and key in _traced:
        return True
    tensors, rebuild = convert_closure(grad_fn, is_tensor)
    if _can_be_traced(lambda: apply(rebuild(_unknown(tensors)), _unknown(inputs), *_unknown(upstreams))):
        if key is not None:
            _remember(key)
        return True
    return _can_be_traced(lambda: apply(grad_fn, inputs, *_unknown(upstreams)))


def _can_be_traced(run_rule: Callable[[], Any]) -> bool:
    graph = FuncGraph("cgshim_rule")
    try:
        with graph.as_default():
            run_rule()
    except Exception:  # noqa: BLE001  # whatever a rule raises that wants a value where a graph has none
        return False
    finally:
        dismantle_func_graph(graph)
    return True


def _unknown(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of the same types without values."""
    return [tf.compat.v1.placeholder(x.dtype, x.shape) if isinstance(x, tf.Tensor) else x for x in tensors]


# --- What has been traced ---------------------------------------------------------------------------------------

_traced: dict[Any, None] = {}
_MOST = 1024


def _remember(key: Any) -> None:
    if len(_traced) >= _MOST:
        _traced.pop(next(iter(_traced)))
    _traced[key] = None
