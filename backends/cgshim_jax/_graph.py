"""What a tracer depends on: a walk over the operations that JAX recorded, back to where they began."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cgshim_jax._tracing import Array, is_tracer


def depends_only_on(tensor: Array, sources: Sequence[Array], never: Iterable[Array] = ()) -> bool:
    """Return True if a tensor was computed from the sources and from constants alone.

    Return False if it was computed from one of `never` that is no source, or if JAX has no record
    of it.
    """
    known = {
        _identity(part)
        for x in sources
        for part in _parts_of(x, getattr(x, "_trace", x) is getattr(tensor, "_trace", None))
    }
    ending = {
        _identity(part)
        for x in never
        if not any(x is y for y in sources)
        for part in _parts_of(x, True)
    }
    todo, seen = [tensor], set[int]()
    while todo:
        x = todo.pop()
        if not (is_tracer(x) or isinstance(x, _Variable)):
            continue
        identity = _identity(x)
        if identity in ending:
            return False
        if identity in known or identity in seen:
            continue
        seen.add(identity)
        origins = _origins_of(x)
        if origins is None:
            return False
        todo += origins
    return True


class _Variable(NamedTuple):
    """A variable of a function that is being traced, in a JAX whose tracers do not know what they
    were made of.
    """

    frame: Any
    variable: Any


def _identity(x: Any) -> int:
    """Return a number that is the same for all tracers of one variable of a jaxpr."""
    if isinstance(x, _Variable):
        return id(x.variable)
    if hasattr(x, "parent"):
        return id(x.val)
    variable = _variable_of(x)
    return id(x) if variable is None else id(variable.variable)


def _parts_of(x: Any, with_pairs: bool) -> list[Any]:
    """Return a tracer, what it stands for, and the tracers in it: a value and its tangent, or a
    batch of values.
    """
    if not is_tracer(x):
        return []
    inner = (with_pairs and _pair_of(x)) or _constant_of(x)
    return [x, *(part for each in inner for part in _parts_of(each, with_pairs))]


def _pair_of(tracer: Any) -> list[Any]:
    """Return the value and the tangent in a tracer of a derivative, or the value in one of a batch."""
    if hasattr(tracer, "primal"):
        return [tracer.primal, tracer.tangent]
    return [tracer.val] if hasattr(tracer, "batch_dim") else []


def _constant_of(x: Any) -> list[Any]:
    """Return the value for which x stands, if x stands for one that a function captured while it
    was traced.
    """
    if hasattr(x, "get_const"):
        value = x.get_const()
    else:
        variable = x if isinstance(x, _Variable) else _variable_of(x)
        value = None if variable is None else variable.frame.constvar_to_val.get(variable.variable)
    return [] if value is None else [value]


def _origins_of(x: Any) -> list[Any] | None:
    """Return what a tracer was made of; None for an argument of a function that is traced, or if
    JAX does not tell.
    """
    if origins := _pair_of(x) or _constant_of(x):
        return origins
    if hasattr(x, "parent"):
        return None if x.parent is None else list(x.parent.in_tracers)
    if hasattr(x, "recipe"):
        return _origins_in(x)
    variable = x if isinstance(x, _Variable) else _variable_of(x)
    return None if variable is None else _operands_of(variable)


def _operands_of(variable: _Variable) -> list[Any] | None:
    """Return the operands of the operation that made a variable; None if none made it."""
    for eqn in variable.frame.eqns:
        if variable.variable in eqn.outvars:
            return [_Variable(variable.frame, v) for v in eqn.invars if not hasattr(v, "val")]
    return None


def _origins_in(tracer: Any) -> list[Any] | None:
    """Return what a tracer was made of by which JAX before 0.7 linearizes a function; None if it
    does not tell.
    """
    if tracer.pval.is_known():
        return [tracer.pval.get_known()]
    if hasattr(tracer.recipe, "in_tracers"):
        return list(tracer.recipe.in_tracers)
    return [tracer.recipe.val] if hasattr(tracer.recipe, "val") else None


def _variable_of(tracer: Any) -> _Variable | None:
    """Return the variable of a tracer, if its frame keeps a table of them."""
    frame = getattr(getattr(tracer, "_trace", None), "frame", None)
    variable = getattr(frame, "tracer_to_var", {}).get(id(tracer))
    return None if variable is None else _Variable(frame, variable)
