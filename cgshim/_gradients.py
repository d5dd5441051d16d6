"""Align what a grad_fn returns with the tensors whose gradient it is, and check it, once for all
backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from cgshim._dtypes import dtype_name, is_complex, is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    count,
    describe,
    describe_spec,
    describe_tree,
    refusal,
    shape_of,
)
from cgshim._protocol import Backend, Tensor
from cgshim._trees import TreeSpec, as_tensor, combine_each, fields_of, joined


@dataclass(slots=True, eq=False)
class Arguments:
    """What is the same in all runs of one call: the op, and what the arguments hold besides
    tensors.

    It has slots and no more: a compiled function of torch checks each class that its trace has
    read.
    """

    op: str
    backend: Backend
    names: Sequence[str]
    specs: Sequence[TreeSpec]
    are_tensors: bool
    """True if each argument is a tensor"""

    def path(self, at: int) -> str:
        """Return the name of a tensor input for messages: its argument's name and the path inside
        it.
        """
        paths = [
            path
            for name, spec in zip(self.names, self.specs, strict=True)
            for path in spec.paths(name)
        ]
        return paths[at]

    def structured(self, flags: Sequence[bool]) -> tuple[Any, ...]:
        """Return flags of the tensor inputs structured as the arguments, with None for what is
        static.
        """
        if self.are_tensors:
            return tuple(flags)
        return tuple(combine_each([spec.without_static() for spec in self.specs], flags))


def gradients_of_arguments(
    arguments: Arguments,
    result: Any,
    shapes: Sequence[Any],
    dtypes: Sequence[Any],
    needed: Sequence[bool] | None = None,
) -> list[Tensor | None]:
    """Return the result of grad_fn for f's arguments as one checked gradient per tensor input that
    needs one.
    """
    op, backend = arguments.op, arguments.backend
    if needed is None:
        flat = list(result) if type(result) in (list, tuple) else [result]
        if len(shapes) < len(flat) == len(arguments.specs):
            flat = [
                g
                for g, spec in zip(flat, arguments.specs, strict=True)
                if spec.count or g is not None
            ]
        if len(flat) == len(shapes) and all(map(partial(_is_as, backend), flat, shapes, dtypes)):
            return flat  # as nearly all do
    aligned = _aligned(arguments, result)
    if needed is not None:
        aligned = [g if is_needed else None for g, is_needed in zip(aligned, needed, strict=True)]
    gradients = zip(aligned, shapes, dtypes, strict=True)
    return [
        gradient
        if _is_as(backend, gradient, shape, dtype)
        else check_gradient(op, backend, gradient, shape, dtype, partial(arguments.path, at))
        for at, (gradient, shape, dtype) in enumerate(gradients)
    ]


def gradients_of_variables(
    arguments: Arguments, result: Any, variables: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return the result of grad_fn for its variables as one checked gradient per variable."""
    op, backend = arguments.op, arguments.backend
    gradients = [None] * len(variables) if result is None else result
    if not isinstance(gradients, (list, tuple)) or len(gradients) != len(variables):
        raise refusal(CustomGradientValueError, op,
                      must=f"grad_fn must return one gradient for each of {count(len(variables), 'variable')}",
                      got=describe(result), do="return (gradients, [one per variable])")  # fmt: skip
    return [
        check_gradient(
            op,
            backend,
            gradient,
            variable.shape,
            variable.dtype,
            partial("variables[{}]".format, at),
        )
        for at, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
    ]


def without_gradients_of_variables(arguments: Arguments, result: Any) -> tuple[Any, Any]:
    """Return the two parts of the result of a grad_fn with variables."""
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise refusal(CustomGradientValueError, arguments.op,
                  must="grad_fn with variables must return a pair (gradients, variable_gradients)",
                  got=describe(result), do="return (gradients, [one per variable])")  # fmt: skip


# --- In whichever order it comes ------------------------------------------------------------------


def _aligned(arguments: Arguments, result: Any) -> Sequence[Any]:
    """Return the leaves of the result of grad_fn, one per tensor input, however it is structured."""
    # a list of one is looked at as such first: Dynamo would guard what it asks of the tensor in it
    if (
        len(arguments.specs) == 1
        and (leaves := arguments.specs[0].align_exactly(result)) is not None
    ):
        return leaves
    for aligned in _readings(arguments, result):
        if aligned is not None:
            return aligned
    names = [
        name for name, spec in zip(arguments.names, arguments.specs, strict=True) if spec.count
    ]
    raise refusal(CustomGradientValueError, arguments.op,
                  must=f"grad_fn must return one gradient for each argument ({', '.join(names)})",
                  got=describe_tree(result),
                  do="return them in order, each None, a tensor, or structured as its argument")  # fmt: skip


def _readings(arguments: Arguments, result: Any) -> Iterator[Sequence[Any] | None]:
    """Yield the readings of a result, the most literal first: per argument, per argument with a
    tensor, flat.
    """
    holding = [spec for spec in arguments.specs if spec.count]
    total = sum(spec.count for spec in arguments.specs)
    several = isinstance(result, (list, tuple)) and _is_in_order(arguments, fields_of(result) or ())
    if (
        several
        and len(result) == len(arguments.specs)
        and not _feeds_what_is_static(arguments.specs, result)
    ):
        yield _align_each(arguments.specs, result)
    if several and len(result) == len(holding):
        yield _align_each(holding, result)
    if len(holding) == 1:
        yield holding[0].align(result)
    flat = several and fields_of(result) is None
    if (
        flat
        and len(result) == total
        and not any(isinstance(g, (list, tuple, dict)) for g in result)
    ):
        yield result
    if several and len(result) == len(arguments.specs):
        yield _align_each(arguments.specs, result)
    if several and len(result) < len(arguments.specs):
        # the last ones left out, which hold no tensor: a call may leave them to their defaults
        first, last = arguments.specs[: len(result)], arguments.specs[len(result) :]
        if not (any(spec.count for spec in last) or _feeds_what_is_static(first, result)):
            yield _align_each(first, result)
    if result is None:
        yield [None] * total


def _is_in_order(arguments: Arguments, fields: Sequence[str]) -> bool:
    """Return True if the fields of a namedtuple with names of arguments come in the order of the
    arguments.
    """
    places = [arguments.names.index(field) for field in fields if field in arguments.names]
    return places == sorted(places)


def _feeds_what_is_static(specs: Sequence[TreeSpec], result: Sequence[Any]) -> bool:
    """Return True if an argument without a tensor would get a gradient, as when the result is flat."""
    return any(not spec.count and g is not None for spec, g in zip(specs, result, strict=True))


def _align_each(specs: Sequence[TreeSpec], gradients: Sequence[Any]) -> list[Any] | None:
    return joined(spec.align(gradient) for spec, gradient in zip(specs, gradients, strict=True))


# --- What fits ------------------------------------------------------------------------------------


def check_gradient(
    op: str, backend: Backend, gradient: Any, shape: Any, dtype: Any, of: Callable[[], str],
    kind: str = "gradient",
) -> Tensor | None:  # fmt: skip
    """Return the gradient, or tangent, in the tensor's dtype if it fits the tensor; None if there
    is none.
    """
    if gradient is None or not is_differentiable(dtype):
        return None
    if _is_as(backend, gradient, shape, dtype):
        return gradient
    tensor = as_tensor(op, backend, gradient)
    if tensor is None:
        if not isinstance(gradient, (int, float, complex)):
            raise refusal(CustomGradientTypeError, op,
                          must=f"the {kind} of {of()} must be a tensor or None",
                          got=describe(gradient), do="return None where there is no gradient")  # fmt: skip
        tensor = backend.convert_to_tensor(
            gradient, None if isinstance(gradient, complex) else dtype
        )
    if not fits(tensor.shape, shape):
        raise refusal(CustomGradientValueError, op,
                      must=f"the {kind} of {of()} must have its shape {describe_spec(shape, dtype)}",
                      got=describe(tensor),
                      do="sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule")  # fmt: skip
    if tensor.dtype == dtype:
        return tensor
    if dtype_name(tensor.dtype) == "bool":
        raise refusal(CustomGradientValueError, op,
                      must=f"the {kind} of {of()} must hold numbers ({describe_spec(shape, dtype)})",
                      got=describe(tensor),
                      do="write ops.where(mask, upstream, 0.0): upstream * mask is one in TensorFlow")  # fmt: skip
    if is_complex(tensor.dtype) and not is_complex(dtype):
        raise refusal(CustomGradientValueError, op,
                      must=f"the {kind} of {of()} must be real as it is ({describe_spec(shape, dtype)})",
                      got=describe(tensor), do="take the real part in the rule")  # fmt: skip
    return backend.convert_to_tensor(tensor, dtype)


def zeros_like(backend: Backend, x: Tensor) -> Tensor:
    """Return the gradient, or tangent, of a tensor that has none."""
    import numpy as np  # above, it would take half of the time of importing cgshim

    return backend.convert_to_tensor(np.zeros(x.shape), x.dtype)


def _is_as(backend: Backend, gradient: Any, shape: Any, dtype: Any) -> bool:
    """Return True if a gradient has the right type, shape and dtype, as nearly all have."""
    return (
        backend.is_tensor(gradient)
        # TensorFlow compares dtypes slowly
        and ((own := gradient.dtype) is dtype or own == dtype)
        and gradient.shape == shape
        and is_differentiable(dtype)
    )


def fits(shape: Any, expected: Any) -> bool:
    """Return True if two shapes are the same as far as they are known, without broadcasting."""
    got, wanted = shape_of(shape), shape_of(expected)
    if ... in got or ... in wanted:
        return True
    return len(got) == len(wanted) and all(
        m is None or n is None or m == n for m, n in zip(got, wanted, strict=True)
    )
