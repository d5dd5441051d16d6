"""An op: bind a call, find its backend, and pass the call to it."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

from cgshim._batches import WithBatches, require_batches
from cgshim._call import Call, ForeignOutputError, output_of_constants
from cgshim._closure import FunctionHolder
from cgshim._dispatch import backend_for, choice_for_plans, chosen_backend, is_lasting
from cgshim._errors import CustomGradientTypeError, add_note, function_name, refusal
from cgshim._foreign import is_traced
from cgshim._gradients import Arguments
from cgshim._pytree import ONE_TENSOR, partition_each
from cgshim._registry import load
from cgshim._signature import Parameters, parameters_of
from cgshim._variables import current_variables, declared_variables

P = ParamSpec("P")
T_co = TypeVar("T_co", covariant=True)
WithRules: TypeAlias = tuple[T_co, Any] | tuple[T_co, Any, Any]
"""an output with its grad_fn, and perhaps its jvp_fn"""
Q = ParamSpec("Q")
S = TypeVar("S")
Plan = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""runs f on arguments of known types, with options; NotImplemented leads to the general path"""
_MOST = 64
"""the most plans that an op caches: usually one per backend for the same types"""


class CustomGradient(FunctionHolder, Generic[P, T_co]):
    """An op: return f's output, with f's own gradient. op_custom_gradient makes it.

    It keeps its state in slots: functools.wraps(other)(op) may write anything into its __dict__,
    even __wrapped__.
    """

    __slots__ = (
        "__dict__", "__weakref__", "_bound", "_f", "_forward_mode", "_kind_of_call", "_name", "_of_methods",
        "_once_differentiable", "_parameters", "_plans", "_variables",
    )  # fmt: skip

    __name__: str
    __qualname__: str
    __wrapped__: Callable[P, tuple[T_co, Any]]
    # TensorFlow's AutoGraph skips objects with this; the backend converts f
    autograph_info__: ClassVar[None] = None

    def __init__(
        self,
        f: Callable[P, WithRules[T_co]],
        *,
        forward_mode: bool = False,
        once_differentiable: bool = False,
        name: str | None = None,
        kind_of_call: type[Call] = Call,
        variables: Any = None,
    ) -> None:
        functools.update_wrapper(self, f, _OF_FUNCTIONS, ())
        self._f, self._variables = f, variables
        self._bound: CustomGradient[..., Any] | None = None
        self._name = name or function_name(f)
        if "__name__" not in self.__dict__:  # a partial or a callable object has none
            self.__name__ = self.__qualname__ = self._name
        self._kind_of_call = kind_of_call
        self._plans: dict[Any, Plan] = {}
        self._parameters: Parameters | None = None  # None for an unbound classmethod
        self._of_methods: tuple[Parameters, dict[Any, Plan]] | None = None
        if callable(f):
            self._parameters, of_methods = parameters_of(f)
            # for tools that do not follow __wrapped__, such as inspect.getfullargspec. Decorators
            # of an op may change __signature__; cgshim binds calls by f's own
            self.__signature__ = self._parameters.signature
            if isinstance(f, FunctionType) or hasattr(f, "binds_as_function"):
                self._of_methods = of_methods, {}
        if self._parameters is not None and "needs_input_grad" in self._parameters.names:
            raise refusal(CustomGradientTypeError, self._name,
                          must="needs_input_grad must be keyword-only in f",
                          got="a positional parameter",
                          do="write f(..., *, needs_input_grad), or give the argument another name")  # fmt: skip
        self._forward_mode = forward_mode
        self._once_differentiable = once_differentiable

    @property
    def name(self) -> str:
        """The op's name in messages, without a lambda's brackets, which Keras rejects."""
        return self._name.strip("<>")

    @property
    def forward_mode(self) -> bool:
        """True if the author promises that grad_fn is linear in upstream."""
        return self._forward_mode

    @property
    def once_differentiable(self) -> bool:
        """True if the op raises an error for the derivative of its gradient."""
        return self._once_differentiable

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Return f's output for these arguments; the framework differentiates it by f's rule."""
        output: T_co
        inputs: Sequence[Any] = args
        chosen = choice_for_plans()
        key: Any = None
        try:
            if chosen is not False:
                key = type(args[0]) if len(args) == 1 else tuple(map(type, args))
                if kwargs:
                    key = key, *kwargs
                if chosen is not None:
                    key = chosen, key
                plan = self._plans.get(key)
                if plan is not None:
                    output = plan(self._f, args, kwargs)
                    if output is not NotImplemented:
                        return output
            call, inputs = self._call_of(args, kwargs)
            if call is None:
                output = self._output_of_constants(args, kwargs)
            else:
                if key is not None:
                    self._keep_plan(key, call, args)
                output = call.backend.custom_gradient(call, inputs)
        except ForeignOutputError as foreign:
            output = output_of_constants(self._name, foreign.constant_of(inputs))
        except Exception as error:
            if not is_traced():
                add_note(error, self._name)
            raise
        return output

    def _output_of_constants(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of an f that gets no tensor."""
        if self._parameters is not None and self._parameters.takes_needs_input_grad:
            _, arguments, _ = self._parameters.bind(self._name, args, kwargs)
            kwargs = {**kwargs, "needs_input_grad": (None,) * len(arguments)}
        output, _ = self._kind_of_call.pair(self._name, self._f, self._f(*args, **kwargs))
        return output_of_constants(self._name, output)

    def _keep_plan(self, key: Any, call: Call, args: tuple[Any, ...]) -> None:
        """Cache a plan for calls with these argument types and option names, if all are tensors.

        The methods of an op share plans, which get the method in each call, because a plan that
        holds it would keep its object alive.
        """
        are_tensors = call.arguments.are_tensors and len(call.arguments.specs) == len(args) > 0
        if not are_tensors or self._variables is not None or key in self._plans:
            return
        types = [*map(type, args)]
        is_known = all(map(call.backend.is_tensor, args)) and all(map(is_lasting, types))
        if is_known and len(self._plans) < _MOST:
            call = call.with_f(self._bound._f if self._bound else self._f, {})
            plan_of: Callable[..., Plan | None] = getattr(
                call.backend, "plan", lambda call, types: None
            )
            self._plans[key] = plan_of(call, types) or functools.partial(_run_by_plan, call)

    def _call_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Call | None, list[Any]]:
        """Return the call with these arguments, and their tensors.

        The call is None if there are no tensors, unless a backend is chosen.
        """
        if self._parameters is None:
            raise refusal(CustomGradientTypeError, self._name,
                          must=f"a {type(self._f).__name__} must be bound when it is called",
                          got="one that is not", do="call it as an attribute of its class")  # fmt: skip
        # read the slots: torch.compile guards a property and its function
        names, arguments, options = self._parameters.bind(self._name, args, kwargs)
        declared = None if self._variables is None else current_variables(self._f, self._variables)
        backend = backend_for(arguments if declared is None else [*arguments, declared])
        if backend is None:
            return None, []
        inputs, specs = partition_each(self._name, backend, arguments)
        if not inputs and declared is None and chosen_backend() is None:
            return None, []
        are_tensors = all(spec is ONE_TENSOR for spec in specs)
        shared = Arguments(self._name, backend, names, specs, are_tensors)
        variables: Sequence[Any] = ()
        if declared is not None:
            variables, shared.variables = declared_variables(self._name, backend, declared)
        if isinstance(self._f, WithBatches):
            require_batches(self._name, backend)
        call = self._kind_of_call(
            shared, self._f, options, forward_mode=self._forward_mode, variables=variables,
            once_differentiable=self._once_differentiable,
            takes_needs_input_grad=self._parameters.takes_needs_input_grad,
        )  # fmt: skip
        return call, inputs

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CustomGradient[P, T_co]: ...
    @overload
    def __get__(
        self: CustomGradient[Concatenate[S, Q], T_co], instance: S, owner: type | None = None
    ) -> CustomGradient[Q, T_co]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> CustomGradient[Any, T_co]:
        """Return the op as a method: f captures the instance, which is not an argument."""
        if instance is not None and type(self._f) is FunctionType and is_traced():
            # torch.compile mistakes a method for f or the op
            return self._bound_to(functools.partial(self._f, instance))
        bind = getattr(self._f, "__get__", None)
        bound: Any = self._f if bind is None else bind(instance, owner)
        return self if bound is self._f else self._bound_to(bound)

    def _bound_to(self, bound: Callable[..., Any]) -> CustomGradient[Any, T_co]:
        """Return the op of a bound f."""
        op = self.with_function(bound)
        op._bound, op._of_methods = self, None
        op._parameters, op._plans = self._of_methods or (Parameters(bound), {})
        op.__signature__ = op._parameters.signature
        return op

    def with_function(self, f: Callable[..., Any]) -> CustomGradient[Any, T_co]:
        """Return the same op of a function that differs only in the tensors it closes over.

        It skips __init__: each access of a method makes an op.
        """
        op: CustomGradient[Any, T_co] = object.__new__(type(self))
        op.__dict__.update(self.__dict__)
        op._f = op.__wrapped__ = f
        op._bound, op._name, op._variables = self._bound, self._name, self._variables
        op._forward_mode, op._once_differentiable = self._forward_mode, self._once_differentiable
        op._kind_of_call, op._parameters = self._kind_of_call, self._parameters
        op._of_methods, op._plans = self._of_methods, {}
        return op

    def __eq__(self, other: object) -> bool:
        """Return True for the same op, or for the same op's method of the same object."""
        if self._bound is None or not isinstance(other, CustomGradient):
            return self is other
        return self._bound is other._bound and self._f == other._f

    def __hash__(self) -> int:
        return object.__hash__(self) if self._bound is None else hash((id(self._bound), self._f))

    def __tf_tracing_type__(self, context: Any) -> Any:
        """Return TensorFlow's type of an op that is an argument of a tf.function.

        Without it TensorFlow would use __wrapped__.
        """
        backend: Any = load("tensorflow")
        return backend.tracing_type(self)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the op by name if f's name leads to it; else as f and the options."""
        module = sys.modules.get(self.__module__)
        qualified_name: str = self.__qualname__
        try:
            named = operator.attrgetter(qualified_name)(module)
            if named is self:
                return qualified_name
            if named == self:  # a static method, which each access makes again
                of_class, _, name = qualified_name.rpartition(".")
                return getattr, (operator.attrgetter(of_class)(module), name)
        except AttributeError:
            pass  # a local function, or an op that is not named after f
        f = self._f.held_function if isinstance(self._f, WithBatches) else self._f
        instance = getattr(f, "__self__", None)
        # Python pickles a method by name
        if isinstance(getattr(instance, self.__name__, None), CustomGradient):
            return getattr, (instance, self.__name__)
        made = functools.partial(
            type(self), forward_mode=self._forward_mode, name=self._name,
            once_differentiable=self._once_differentiable, kind_of_call=self._kind_of_call, variables=self._variables,
        )  # fmt: skip
        return made, (self._f,)

    def __repr__(self) -> str:
        return f"<op {self._name} with a custom gradient>"


def _run_by_plan(
    call: Call, f: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Run a call on a backend without a fast path."""
    if not all(map(call.backend.is_tensor, args)):
        return NotImplemented
    return call.backend.custom_gradient(call.with_f(f, options), args)


_OF_FUNCTIONS = (*functools.WRAPPER_ASSIGNMENTS, "__isabstractmethod__")
"""the attributes that an op copies from f"""
