"""op_custom_gradient: bind a call, find its backend, and hand the call over."""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from cgshim._call import Call, ForeignOutputError, checked_pair, output_of_constants
from cgshim._choice import backend_for, config_backend, framework_of_type, is_lasting
from cgshim._contents import FunctionHolder
from cgshim._errors import CustomGradientTypeError, describe, function_name, sentence
from cgshim._foreign import KERAS, is_traced
from cgshim._gradients import Arguments
from cgshim._parameters import Parameters
from cgshim._registry import load
from cgshim._trees import ONE_TENSOR, partition_each

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
Q = ParamSpec("Q")
S = TypeVar("S")


class CustomGradient(FunctionHolder, Generic[P, T_co]):
    """An op: it returns f's output, with the gradient of f's own rule. op_custom_gradient makes it.

    What it runs is in slots: functools.wraps(other)(op) and the like may write anything into its __dict__,
    __wrapped__ included, and it remains this op.
    """

    __slots__ = (
        "__dict__", "__weakref__", "_bound", "_calls", "_f", "_forward_mode", "_name", "_once_differentiable",
        "_parameters", "_signature",
    )  # fmt: skip

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, tuple[T_co, Any]]
    __isabstractmethod__: bool
    autograph_info__: ClassVar[None] = None  # TensorFlow's AutoGraph skips what has this; the backend converts f

    def __init__(
        self,
        f: Callable[P, tuple[T_co, Any]],
        *,
        forward_mode: bool = False,
        once_differentiable: bool = False,
        name: str | None = None,
        bound: tuple[CustomGradient[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        if getattr(f, "__isabstractmethod__", False):
            self.__isabstractmethod__ = True
        self._f = f
        self._bound = bound
        self._parameters = _parameters_of(f, bound[0] if bound else None)
        self._signature: inspect.Signature | None = None
        self._calls: dict[tuple[str | type | None, ...], Call | None] = {}
        self._forward_mode = forward_mode
        self._once_differentiable = once_differentiable
        self._name = name or function_name(f)

    @property
    def name(self) -> str:
        """What messages call the op."""
        return self._name

    @property
    def forward_mode(self) -> bool:
        """Whether the author promises that grad_fn is linear in upstream."""
        return self._forward_mode

    @property
    def once_differentiable(self) -> bool:
        """Whether the derivative of the gradient is refused."""
        return self._once_differentiable

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Return f's output for these arguments; the framework differentiates it by f's rule."""
        output: T_co
        inputs: Sequence[Any] = args
        call = None if kwargs or is_traced() else self._call_of_tensors(config_backend(), *map(type, args))
        if call is None or not all(map(call.backend.is_tensor, args)):
            call, inputs = self._call_of(args, kwargs)
        if call is None:
            output, _ = checked_pair(self.name, self._f, self._f(*args, **kwargs))
            return output_of_constants(self.name, output)
        try:
            output = call.backend.custom_gradient(call, inputs)
        except ForeignOutputError as foreign:
            output = output_of_constants(self.name, foreign.constant_of(inputs))
        return output

    def _call_of_tensors(self, chosen: str | None, *types: type) -> Call | None:
        """Return the call whose positional arguments are tensors of these types; None if the types do not decide it.

        It is the plan of all such calls: made at the first one, found again by the types and the chosen backend.
        """
        try:
            return self._calls[(chosen, *types)]
        except KeyError:
            call = self._new_call_of_tensors(chosen, types)
        if len(self._calls) < _MOST and all(map(is_lasting, types)):
            self._calls[(chosen, *types)] = call
        return call

    def _new_call_of_tensors(self, chosen: str | None, types: Sequence[type]) -> Call | None:
        frameworks = set(map(framework_of_type, types))
        (name,) = frameworks if len(frameworks) == 1 else (None,)
        if self._parameters is None or not self._parameters.are_named(len(types)) or name in (None, KERAS):
            return None
        specs = [ONE_TENSOR] * len(types)
        return self._made_call(Arguments(self.name, load(chosen or name), self._parameters.names, specs, True), {})

    def _call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call | None, list[Any]]:
        """Return the call with these arguments and the tensors in them; the call is None if there are none."""
        if self._parameters is None:
            raise CustomGradientTypeError(
                sentence(self.name, must=f"a {type(self._f).__name__} must be bound when it is called",
                         got="one that is not",
                         do="call it as an attribute of its class")
            )  # fmt: skip
        names, arguments, options = self._parameters.bind(self.name, args, kwargs)
        backend = backend_for(arguments)
        if backend is None:
            return None, []
        inputs, specs = partition_each(self.name, backend, arguments)
        if not inputs:
            return None, []
        are_tensors = all(spec is ONE_TENSOR for spec in specs)
        return self._made_call(Arguments(self.name, backend, names, specs, are_tensors), options), inputs

    def _made_call(self, arguments: Arguments, options: Mapping[str, Any]) -> Call:
        return Call(
            arguments, self._f, options, forward_mode=self.forward_mode, once_differentiable=self.once_differentiable
        )

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CustomGradient[P, T_co]: ...
    @overload
    def __get__(
        self: CustomGradient[Concatenate[S, Q], T_co], instance: S, owner: type | None = None
    ) -> CustomGradient[Q, T_co]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> CustomGradient[Any, T_co]:
        """Return the op as a method: the instance is not an argument, but is captured by f."""
        bind = getattr(self._f, "__get__", None)
        bound: Any = self._f if bind is None else bind(instance, owner)
        if bound is self._f:
            if instance is None or not isinstance(self._f, FunctionType):
                return self
            bound = functools.partial(self._f, instance)  # torch.compile, when it traces, mistakes a method for f
        return CustomGradient(
            bound, forward_mode=self.forward_mode, once_differentiable=self.once_differentiable, name=self.name,
            bound=(self, bound),
        )  # fmt: skip

    @property
    def held_function(self) -> Callable[..., Any]:
        """f, for the search of the tensors in its closure."""
        return self._f

    def holding(self, function: Callable[..., Any]) -> CustomGradient[P, T_co]:
        """Return the same op with another f, which has the same code."""
        op = object.__new__(type(self))
        op.__dict__.update(self.__dict__)
        op._f = op.__wrapped__ = function
        op._bound, op._parameters, op._signature, op._calls = None, self._parameters, self._signature, {}
        op._forward_mode, op._once_differentiable, op._name = self.forward_mode, self.once_differentiable, self.name
        return op

    def __eq__(self, other: object) -> bool:
        """Return True if other is this op, or if both are methods of the same op bound to the same object."""
        if self is other or not isinstance(other, CustomGradient) or not (self._bound and other._bound):
            return self is other
        return self._bound[0] is other._bound[0] and self._bound[1] == other._bound[1]

    def __hash__(self) -> int:
        return object.__hash__(self) if self._bound is None else hash((id(self._bound[0]), self._bound[1]))

    @property
    def __signature__(self) -> inspect.Signature:
        """f's parameters, for tools that do not follow __wrapped__, such as inspect.getfullargspec."""
        if self._signature is not None:
            return self._signature
        if self._parameters is None:
            raise AttributeError("__signature__")
        return self._parameters.signature

    @__signature__.setter
    def __signature__(self, signature: inspect.Signature) -> None:
        """Set what to show, as decorators do that wrap an op; calls are still bound by f's own."""
        self._signature = signature

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Return TensorFlow's type of an op as an argument of a tf.function; it would use __wrapped__ otherwise."""
        backend: Any = load("tensorflow")
        return backend.tracing_type(self)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the op by name if f's name leads to it, as with functions and methods; else as f and the options."""
        module = sys.modules.get(self.__module__)
        qualified_name: str = getattr(self, "__qualname__", self.name)
        try:
            if operator.attrgetter(qualified_name)(module) is self:
                return qualified_name
        except AttributeError:
            pass  # a local function, or an op that has another name than f
        instance = getattr(self._f, "__self__", None)
        if isinstance(getattr(instance, self.__name__, None), CustomGradient):  # a method, which Python pickles by name
            return getattr, (instance, self.__name__)
        return _restore, (self._f, self.forward_mode, self.name, self.once_differentiable)

    def __repr__(self) -> str:
        return f"<op {self.name} with a custom gradient>"


_MOST = 64
"""how many plans an op keeps at most: usually one for the types of its arguments in each backend"""


def _restore(
    f: Callable[..., tuple[Any, Any]], forward_mode: bool, name: str, once_differentiable: bool
) -> CustomGradient[..., Any]:
    return CustomGradient(f, forward_mode=forward_mode, once_differentiable=once_differentiable, name=name)


def _parameters_of(f: Callable[..., Any], op: CustomGradient[..., Any] | None) -> Parameters | None:
    """Return f's parameters, from the op if f is a method of one; None for a classmethod that is not bound."""
    if op is not None and op._parameters is not None and isinstance(op._f, FunctionType):
        return op._parameters.of_method()
    return Parameters(f) if callable(f) else None


_NO_FUNCTIONS = (property, functools.cached_property, functools.singledispatchmethod)
"""descriptors whose attribute is not a function, or has the signature of another one"""


@overload
def op_custom_gradient(
    f: Callable[P, tuple[T_co, Any]],
    /,
    *,
    forward_mode: bool = False,
    once_differentiable: bool = False,
    name: str | None = None,
) -> CustomGradient[P, T_co]: ...
@overload
def op_custom_gradient(
    f: None = None, /, *, forward_mode: bool = False, once_differentiable: bool = False, name: str | None = None
) -> Callable[[Callable[P, tuple[T_co, Any]]], CustomGradient[P, T_co]]: ...
def op_custom_gradient(
    f: Callable[..., tuple[Any, Any]] | None = None,
    /,
    *,
    forward_mode: bool = False,
    once_differentiable: bool = False,
    name: str | None = None,
) -> Any:
    """Give a function its own gradient, in every framework.

    Parameters
    ----------
    f : callable
        ``f(*args, **options) -> (output, grad_fn)``. Arguments and output are trees whose tensors (of any shape and
        dtype) take part in differentiation; the rest of them is static. Keyword-only parameters are options.
        ``grad_fn`` turns upstream gradients, structured as the output, into one gradient for each argument. Write it
        as ``grad(upstream)``, as ``grad(*args, upstream)`` or as ``grad(d1, d2, ...)`` with one upstream gradient for
        each tensor output. If it has a parameter ``variables`` (or ``**kwargs``), it gets the trainable state that f
        reads, and returns ``(gradients, [one for each variable])``.
    forward_mode : bool
        Promise that grad_fn is linear in upstream, so that forward mode (jvp, jacfwd) may use its transpose.
    once_differentiable : bool
        Raise an error if the gradient is differentiated. f then never runs again, and only what grad_fn keeps is saved.
    name : str, optional
        The op's name in messages; by default f's name.

    Returns
    -------
    callable
        It takes f's parameters, and returns f's output without grad_fn. Without ``f``, a decorator.

    Raises
    ------
    CustomGradientTypeError
        If f does not return such a pair, or grad_fn has no known form.
    CustomGradientValueError
        In the backward pass, if a gradient does not have the shape of its argument.
    BackendError
        If tensors of two frameworks meet, or the chosen backend cannot be imported.

    Examples
    --------
    >>> import numpy as np
    >>> @op_custom_gradient
    ... def double(x):
    ...     return 2 * x, lambda upstream: 2 * upstream
    >>> double(np.array([3.0]))
    array([6.])

    Notes
    -----
    The convention is that of ``tf.custom_gradient`` and ``keras.ops.custom_gradient``, on every backend.

    The derivative of a gradient goes through grad_fn and what it keeps. A kept output of f is the op's output, and
    grad_fn gives its derivative. Any other kept tensor is a function of the arguments, through f's own operations.
    f runs once per call; if the derivative of such a tensor is needed and was not recorded, f runs once more for it.
    A gradient of None is zero. A grad_fn that raises an exception forbids the gradient: taking one raises it.

    Complex numbers: upstream and gradients of a real loss L are dL/dx + i dL/dy, so the rule of ``z * z`` is
    ``upstream * conj(2 * z)``. If a framework uses the conjugate (JAX, autograd), cgshim conjugates.
    """
    if f is None:
        return functools.partial(
            op_custom_gradient, forward_mode=forward_mode, once_differentiable=once_differentiable, name=name
        )
    if not (callable(f) or hasattr(f, "__get__")) or isinstance(f, _NO_FUNCTIONS):
        raise CustomGradientTypeError(
            sentence("op_custom_gradient", must="f must be callable", got=describe(f), do="decorate a function")
        )
    return CustomGradient(f, forward_mode=forward_mode, once_differentiable=once_differentiable, name=name)
