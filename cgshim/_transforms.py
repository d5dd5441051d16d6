"""Derivatives from the framework itself, with JAX's names and semantics."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from cgshim._dispatch import backend_or_numpy, beside, run_outside_rule, value_of
from cgshim._dtypes import is_complex, is_differentiable
from cgshim._errors import (
    BackendError,
    CustomGradientTypeError,
    count,
    describe,
    describe_tree,
    function_name,
    refusal,
)
from cgshim._foreign import converted_as_caller, not_converted
from cgshim._gradients import check_gradient, zeros_like
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import (
    TreeSpec,
    combine_each,
    partition,
    partition_each,
    subvals,
    with_leaves,
)
from cgshim._registry import name_of

Pullback: TypeAlias = Callable[[Any], tuple[Any, ...]]
FlatVjp: TypeAlias = Callable[
    ..., tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]
]


@not_converted
def op_vjp(
    fn: Callable[..., Any],
    /,
    *args: Any,
    variables: Sequence[Tensor] | None = None,
    as_in_rules: bool = False,
) -> tuple[Any, Pullback]:
    """Return a function's output and its pullback, from upstream gradients to gradients.

    Parameters
    ----------
    fn : callable
        Any function that the backend can differentiate.
    *args : trees of tensors
        The arguments, tensors of any shape. Python floats among them are tensors, as in
        ``jax.vjp``.
    variables : list of float or complex tensors, optional
        The tensors that fn captures: on PyTorch tensors that require grad, on TensorFlow Variables
        and tensors. JAX and NumPy differentiate only by arguments.
    as_in_rules : bool
        Take and return complex gradients as rules do, dL/dx + i dL/dy; set it in a rule. By default
        they are the framework's own: JAX's and autograd's are the conjugates.

    Returns
    -------
    output : tree of tensors
        ``fn(*args)``.
    pullback : callable
        Takes upstream gradients structured as the output, and returns a tuple with one gradient for
        each argument, structured as it, with None for all but float and complex tensors. It may be
        called several times. With variables it returns a pair, as a rule does: that tuple, and a
        list with one gradient for each variable, zeros for one that fn does not read.

    Raises
    ------
    CustomGradientTypeError
        If variables are not different float or complex tensors, or the framework cannot
        differentiate by them.
    CustomGradientTypeError, CustomGradientValueError
        From the pullback, if the upstream gradients do not fit the output.

    Examples
    --------
    >>> import numpy as np
    >>> output, pullback = op_vjp(lambda x, y: x * y, np.array([2.0, 3.0]), np.array([5.0, 7.0]))
    >>> pullback(np.array([1.0, 10.0]))
    (array([ 5., 70.]), array([ 2., 30.]))

    Notes
    -----
    It uses ``jax.vjp``, ``torch.autograd``, ``tf.GradientTape`` or ``autograd``. Higher derivatives
    work.
    """
    require_callable("op_vjp", fn)
    op = f"op_vjp({function_name(fn)})"
    read = variables if isinstance(variables, (list, tuple)) else ()
    backend = backend_or_numpy([*args, *read])
    if variables is not None:
        variables = checked_variables(op, backend, variables)
    offered = getattr(backend, "vjp_of_rules", None) if as_in_rules else None
    return _vjp(op, backend, converted_as_caller(backend, fn), args, variables, offered)


@not_converted
def op_jvp(
    fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, Any]:
    """Return a function's output and its derivative along tangents, by forward mode.

    Parameters
    ----------
    fn : callable
        Any function that the backend can differentiate in forward mode.
    primals : tuple or list of trees of tensors
        The arguments, tensors of any shape.
    tangents : tuple or list of trees of tensors
        One tangent for each argument, structured as it, in its shapes and dtypes; None is zero.

    Returns
    -------
    output : tree of tensors
        ``fn(*primals)``.
    tangent : tree of tensors
        The tangent of the output, structured as it, with None for all but float and complex tensors.

    Raises
    ------
    CustomGradientTypeError, CustomGradientValueError
        If the tangents do not fit the arguments.
    TransformationError
        If an op in fn has neither ``forward_mode=True`` nor a jvp_fn.

    Examples
    --------
    >>> import numpy as np
    >>> op_jvp(lambda x: x * x, (np.array([2.0, 3.0]),), (np.array([1.0, 10.0]),))
    (array([4., 9.]), array([ 4., 60.]))

    Notes
    -----
    The name and the semantics follow ``jax.jvp``. It uses ``jax.jvp``, ``torch.func.jvp``,
    ``tf.autodiff.ForwardAccumulator`` or ``autograd.make_jvp``.
    """
    require_callable("op_jvp", fn)
    op = f"op_jvp({function_name(fn)})"
    backend = backend_or_numpy([*primals, *tangents])
    flat = _flat(op, backend, converted_as_caller(backend, fn), primals)
    if len(tangents) != len(primals):
        raise refusal(CustomGradientTypeError, op, must="each argument must have a tangent",
                      got=f"{count(len(tangents), 'tangent')} for {count(len(primals), 'argument')}",
                      do="write None for a tangent of zero")  # fmt: skip
    given: list[Any] = []
    for at, (spec, tangent) in enumerate(zip(flat.specs, tangents, strict=True)):
        own = flat.inputs[len(given) : len(given) + spec.count]
        given += _fitting(op, backend, spec, own, tangent, f"argument {at}", "tangent")
    moving = [given[at] for at in flat.places]
    outputs, pushed = jvp_of(backend)(flat.function, flat.differentiable, moving)
    of_outputs = [
        t if is_differentiable(y.dtype) else None for y, t in zip(outputs, pushed, strict=True)
    ]
    return flat.output.combine(outputs), flat.output.without_static().combine(of_outputs)


@not_converted
def op_value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
    """Return a function that returns both fn's scalar output and its gradient.

    Parameters
    ----------
    fn : callable
        Any function of tensors, with a real scalar output.
    argnums : int or sequence of int
        The positional arguments, trees of float or complex tensors, to differentiate with respect
        to.
    has_aux : bool
        True if fn returns ``(output, aux)``: a pytree aux is returned as it is.

    Returns
    -------
    callable
        It takes fn's parameters, and returns ``(output, gradient)``, or
        ``((output, aux), gradient)``. The gradient is structured as the argument; it is a tuple of
        gradients if argnums is a sequence.

    Raises
    ------
    CustomGradientTypeError
        From the function, if the output is not a real scalar or an argument holds no float.

    Examples
    --------
    >>> import numpy as np
    >>> value, gradient = op_value_and_grad(lambda x, y: (x * y).sum(), argnums=1)(np.ones(2), np.array([5.0, 7.0]))
    >>> float(value), gradient
    (12.0, array([1., 1.]))

    Notes
    -----
    The names and the semantics follow ``jax.value_and_grad``.
    """
    return _value_and_grad("op_value_and_grad", fn, argnums, has_aux)


def _value_and_grad(
    op: str, fn: Callable[..., Any], argnums: int | Sequence[int], has_aux: bool
) -> Callable[..., tuple[Any, Any]]:
    require_callable(op, fn)
    op = f"{op}({function_name(fn)})"
    several = isinstance(argnums, Sequence)

    @not_converted
    def value_and_gradient(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        numbers = _places(op, argnums, len(args))
        backend = backend_or_numpy(args)

        def of_chosen(*chosen: Any) -> Any:
            output = of_all(*subvals(args, numbers, chosen), **kwargs)
            output, aux = _with_aux(op, output) if has_aux else (output, ())
            return _real_scalar(op, backend, output), aux

        of_all = converted_as_caller(backend, fn)
        chosen = [_differentiable(op, backend, args[at], at) for at in numbers]
        (output, aux), pullback = _vjp(op, backend, of_chosen, chosen)
        one = beside(backend, output, backend.convert_to_tensor, 1.0, output.dtype)
        gradients = pullback((one, with_leaves(backend, lambda _: None, aux)))
        return (output, aux) if has_aux else output, gradients if several else gradients[0]

    return value_and_gradient


@not_converted
def op_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that returns the gradient of fn's scalar output.

    Parameters
    ----------
    fn : callable
        Any function of tensors, with a real scalar output.
    argnums : int or sequence of int
        The positional arguments, trees of float or complex tensors, to differentiate with respect
        to.
    has_aux : bool
        True if fn returns ``(output, aux)``: a pytree aux is returned as it is.

    Returns
    -------
    callable
        It takes fn's parameters and returns the gradient, structured as the argument; a tuple if
        argnums is a sequence. With has_aux it returns ``(gradient, aux)``.

    Raises
    ------
    CustomGradientTypeError
        From the function, if the output is not a real scalar or an argument holds no float.

    Examples
    --------
    >>> import numpy as np
    >>> float(op_grad(op_grad(lambda x: x**3))(2.0))
    12.0

    Notes
    -----
    The names and the semantics follow ``jax.grad``.
    """
    value_and_gradient = _value_and_grad("op_grad", fn, argnums, has_aux)

    @not_converted
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_gradient(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return gradient


def _vjp(
    op: str,
    backend: Backend,
    fn: Callable[..., Any],
    args: Sequence[Any],
    variables: Sequence[Tensor] | None = None,
    flat_vjp: FlatVjp | None = None,
) -> tuple[Any, Pullback]:
    flat = _flat(op, backend, fn, args)
    inputs, places = flat.inputs, flat.places
    if variables:
        flat_vjp = by_variables_too(op, backend, variables)
    outputs, flat_pullback = (flat_vjp or backend.vjp)(flat.function, flat.differentiable)
    specs_of_gradients = [spec.without_static() for spec in flat.specs]

    @not_converted
    def pullback(upstream: Any) -> tuple[Any, ...]:
        gradients = flat_pullback(_fitting(op, backend, flat.output, outputs, upstream))
        of_inputs = subvals([None] * len(inputs), places, gradients[: len(places)])
        of_args = tuple(combine_each(specs_of_gradients, of_inputs))
        return of_args if variables is None else (of_args, list(gradients[len(places) :]))

    return flat.output.combine(outputs), pullback


class _Flat(NamedTuple):
    """A call as a function of the float and complex tensors in its arguments."""

    function: Callable[..., Sequence[Tensor]]
    inputs: Sequence[Tensor]
    places: Sequence[int]
    """the indices of the differentiated tensors among the inputs"""
    specs: Sequence[TreeSpec]
    specs_of_outputs: list[TreeSpec]
    """holds the spec of the last run's output"""

    @property
    def differentiable(self) -> list[Tensor]:
        return [self.inputs[at] for at in self.places]

    @property
    def output(self) -> TreeSpec:
        """The spec of the last run's output."""
        return self.specs_of_outputs[-1]


def _flat(op: str, backend: Backend, fn: Callable[..., Any], args: Sequence[Any]) -> _Flat:
    inputs, specs = partition_each(op, backend, [floats_to_tensors(backend, arg) for arg in args])
    places = [at for at, x in enumerate(inputs) if is_differentiable(x.dtype)]
    specs_of_outputs: list[TreeSpec] = []

    def function(*tensors: Tensor) -> Sequence[Tensor]:
        args = combine_each(specs, subvals(inputs, places, tensors))
        outputs, spec = partition(op, backend, run_outside_rule(fn, *args))
        specs_of_outputs[:] = [spec]
        return outputs

    return _Flat(function, inputs, places, specs, specs_of_outputs)


def require_callable(op: str, fn: Any) -> None:
    """Raise an error if fn is not callable."""
    if not callable(fn):
        raise refusal(CustomGradientTypeError, op, must="the function must be callable",
                      got=describe(fn), do="pass the function first")  # fmt: skip


def _places(op: str, argnums: Any, count_of_arguments: int) -> list[int]:
    """Return the argument indices in argnums, counted from the first; raise for missing ones."""
    try:
        numbers = list(map(operator.index, argnums if isinstance(argnums, Sequence) else [argnums]))
    except TypeError:
        numbers = []
    places = [
        at % count_of_arguments for at in numbers if -count_of_arguments <= at < count_of_arguments
    ]
    if not numbers or len(set(places)) < len(numbers):
        raise refusal(CustomGradientTypeError, op,
                      must="argnums must number different positional arguments",
                      got=f"{argnums!r} for {count(count_of_arguments, 'positional argument')}",
                      do="pass them by position, and name each once")  # fmt: skip
    return places


def checked_variables(op: str, backend: Backend, variables: Sequence[Any]) -> list[Tensor]:
    """Return the variables as the backend's tensors; raise unless all are different floats."""
    if not isinstance(variables, (list, tuple)):
        raise refusal(CustomGradientTypeError, op, must="variables must be a list of tensors",
                      got=describe(variables), do="write variables=[...]")  # fmt: skip
    tensors: dict[int, Tensor] = {}
    for variable in variables:
        tensor = value_of(variable)
        # a Keras Variable that casts itself makes a new tensor at each read
        is_one = tensor is value_of(variable)
        if not (is_one and backend.is_tensor(tensor) and is_differentiable(tensor.dtype)):
            raise refusal(CustomGradientTypeError, op,
                          must=f"variables must be float or complex tensors of {name_of(backend)}",
                          got=describe(variable), do="leave out what has no gradient")  # fmt: skip
        if id(tensor) in tensors:
            raise refusal(CustomGradientTypeError, op, must="variables must be different tensors",
                          got=f"{describe(variable)} twice", do="name it once")  # fmt: skip
        tensors[id(tensor)] = tensor
    return list(tensors.values())


def by_variables_too(op: str, backend: Backend, variables: Sequence[Tensor]) -> FlatVjp:
    """Return the backend's vjp, with gradients of the inputs, then of the variables."""
    offered: FlatVjp | None = getattr(backend, "vjp_with_variables", None)
    if offered is None:
        raise refusal(CustomGradientTypeError, op,
                      must=f"{name_of(backend)} differentiates only by arguments",
                      got=count(len(variables), "variable"), do="pass them as arguments")  # fmt: skip
    return partial(offered, variables=variables)


def floats_to_tensors(backend: Backend, tree: Any) -> Any:
    if backend.is_tensor(tree):
        return tree
    leaves, structure = backend.tree_flatten(tree)
    numbers = [isinstance(x, (float, complex)) for x in leaves]
    if not any(numbers):
        return tree  # itself: fn may write to it
    converted = [
        backend.convert_to_tensor(x) if is_number else x
        for x, is_number in zip(leaves, numbers, strict=True)
    ]
    return backend.tree_unflatten(structure, converted)


def _fitting(
    op: str,
    backend: Backend,
    spec: TreeSpec,
    tensors: Sequence[Tensor],
    tree: Any,
    of: str = "the output",
    kind: str = "upstream gradient",
) -> list[Tensor]:
    """Return the leaves of a tree, one per tensor; zeros for None, as for an integer tensor."""
    leaves = [None] * spec.count if tree is None and kind == "tangent" else spec.align(tree)
    if leaves is None:
        raise refusal(CustomGradientTypeError, op, must=f"the {kind}s must be structured as {of}",
                      got=describe_tree(tree),
                      do=f"write them as {describe_tree(spec.combine(tensors))}")  # fmt: skip
    fitting = []
    for at, (leaf, x) in enumerate(zip(leaves, tensors, strict=True)):
        check = partial(check_gradient, op, backend, leaf, x.shape, x.dtype)
        checked = beside(backend, x, check, partial(spec.path, of, at), kind.split()[-1])
        fitting.append(zeros_like(backend, x) if checked is None else checked)
    return fitting


def jvp_of(backend: Backend) -> Callable[..., tuple[Sequence[Tensor], Sequence[Tensor]]]:
    """Return the backend's forward mode.

    ``jvp(fn, inputs, tangents)`` returns the outputs and their tangents.
    """
    if not hasattr(backend, "jvp"):
        raise refusal(BackendError, name_of(backend), must="forward mode needs jvp(fn, inputs, tangents)",
                      got="a backend without it", do='write it, or check modes=("reverse",)')  # fmt: skip
    return backend.jvp  # type: ignore[no-any-return]


def _differentiable(op: str, backend: Backend, argument: Any, at: int) -> Any:
    """Return argument if it holds tensors and all can have gradients; else raise an error."""
    tensors, _ = partition(op, backend, floats_to_tensors(backend, argument))
    if tensors and all(is_differentiable(x.dtype) for x in tensors):
        return argument
    raise refusal(CustomGradientTypeError, op,
                  must=f"argument {at} must hold only float or complex tensors",
                  got=describe_tree(argument), do="convert it, or leave it out of argnums")  # fmt: skip


def _with_aux(op: str, result: Any) -> tuple[Any, Any]:
    """Return the output and aux of a function; raise if it does not return a pair."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    raise refusal(CustomGradientTypeError, op,
                  must="the function must return a pair (output, aux) with has_aux=True",
                  got=describe_tree(result), do="return both, or leave out has_aux")  # fmt: skip


def _real_scalar(op: str, backend: Backend, output: Any) -> Any:
    if (
        backend.is_tensor(output)
        and tuple(output.shape) == ()
        and is_differentiable(output.dtype)
        and not is_complex(output.dtype)
    ):
        return output
    raise refusal(CustomGradientTypeError, op, must="the function must return one real scalar",
                  got=describe_tree(output), do="use op_vjp for other outputs")  # fmt: skip
