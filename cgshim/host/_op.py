"""A function of NumPy arrays as an op without a derivative, by the backend's own way to the host."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from cgshim.backend import (
    Backend,
    BackendError,
    CustomGradient,
    Parameters,
    Tensor,
    TreeSpec,
    WithoutDerivative,
    backend_or_numpy,
    is_traced,
    not_converted,
    partition_each,
    refusal,
    refuse_without_tensor,
)
from cgshim.host._call import HostCall, HostFunction, last_errors, refuse_host_derivative
from cgshim.host._specs import Spec, spec_of


@not_converted
class OnHost(WithoutDerivative):
    """f of an op that runs on the host: it returns what the function of NumPy arrays returns, and a
    rule that refuses.

    So as a residual the result is a constant at first order, and the error comes only if somebody
    takes its derivative.
    """

    binds_as_function = True

    def __init__(self, function: HostFunction) -> None:
        functools.update_wrapper(self, function.function, updated=())
        self.function = function
        self._default_options = Parameters(function.function).default_options
        self._rule = refusing(function.name)

    def __call__(self, /, *args: Any, **options: Any) -> tuple[Any, Callable[..., NoReturn]]:
        backend = backend_or_numpy(args)
        inputs, specs = partition_each(self.function.name, backend, args)
        options = self._default_options | options  # which outputs may ask for
        return self.output(backend, inputs, specs, options), self._rule

    def output(
        self,
        backend: Backend,
        inputs: Sequence[Tensor],
        specs: Sequence[TreeSpec],
        options: Mapping[str, Any],
    ) -> Any:
        """Return what the function returns for the arguments of these specs, which hold these
        tensors.
        """
        call = HostCall(self.function, specs, options)
        declared, structure = call.declared(backend, list(map(spec_of, inputs)))
        if inputs and not declared:
            refuse_without_tensor(call.name, backend, backend.tree_unflatten(structure, []))
        results = _on_host(backend, call, inputs, declared)
        return results[0] if structure is None else backend.tree_unflatten(structure, results)

    def __reduce__(self) -> tuple[Any, ...]:
        return OnHost, (self.function,)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Return the function of an object: a static first argument of f and of outputs."""
        if instance is None or isinstance(self.function.function, staticmethod):
            return self
        return of_object(self, instance)


def _on_host(
    backend: Backend, call: HostCall, inputs: Sequence[Tensor], declared: Sequence[Spec]
) -> Sequence[Tensor]:
    """Return the results as tensors, by the backend's own way to the host if it has one."""
    offered: Callable[..., Sequence[Tensor]] | None = getattr(backend, "host_function", None)
    if offered is not None:
        return offered(call, inputs, declared)
    try:
        arrays = list(map(backend.convert_to_numpy, inputs))
    except Exception as error:
        raise refusal(BackendError, call.name,
                      must="a function on the host needs the values of its arguments",
                      got=f"{type(error).__name__} from {backend.__name__}",
                      do="call it eagerly") from error  # fmt: skip
    return list(map(backend.convert_to_tensor, call.run(arrays)))


def of_object(function: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """Return a function as a method of an object: the same, and pickled, wherever Python asks for it.

    torch.compile takes none for a method whose function is an object.
    """
    return (functools.partial if is_traced() else types.MethodType)(function, instance)


def in_place_of(f: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with f's name and signature, which is static in a class if f is."""
    named = functools.wraps(f)(function)
    return staticmethod(named) if isinstance(f, staticmethod) else named


def refusing(name: str) -> Callable[..., NoReturn]:
    """Return the rule of an op that has no derivative."""

    @not_converted
    def refuse(*upstreams: Tensor) -> NoReturn:
        refuse_host_derivative(name)

    return refuse


class host_errors:  # noqa: N801  # a context manager that is called like a function
    """Raise an error of a host function as it was raised, also where a framework's compiled code
    wraps it.

    Raises
    ------
    Exception
        What the function raised, with its own traceback, from the framework's error.

    Examples
    --------
    >>> with host_errors():
    ...     pass
    """

    def __enter__(self) -> None:
        last_errors.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any
    ) -> None:
        if (
            last_errors
            and last_errors[0] is not error
            and type(last_errors[0]).__name__ in str(error)
        ):
            raise last_errors.pop() from error


def host_op(function: HostFunction) -> CustomGradient[..., Any]:
    """Return the op of a function of NumPy arrays, which has no derivative: in forward mode too,
    its rule refuses.
    """
    return CustomGradient(OnHost(function), forward_mode=True, name=function.name)
