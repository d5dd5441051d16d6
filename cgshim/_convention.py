"""How a grad_fn wants to be called, and what it may return: every check, and every message, once for all backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cgshim._backend import Backend, Tensor, constant_when_traced
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    describe,
    describe_spec,
    describe_tree,
    dtype_name,
    function_name,
    is_complex,
    listing,
    sentence,
    shape_of,
)
from cgshim._tree import Parts, as_tensor, fields_of, fill_each

if TYPE_CHECKING:
    from cgshim._call import Call

FORMS = "grad(upstream), grad(*args, upstream) or grad(d1, d2, ...), each with or without variables last"


# --- How it wants to be called ----------------------------------------------------------------------------------


_MANY = float("inf")


class Signature(NamedTuple):
    """What there is to know of a grad_fn's parameters: how many it takes by position, and which by name."""

    required: int
    """positional parameters without a default"""
    accepted: float
    """positional parameters in all; infinite with *args"""
    upstream_at: float | None
    """where a parameter called upstream stands: its position, infinite when it is keyword-only"""
    variables: bool | None
    """whether a parameter takes the variables, and (True) whether it has to have them"""
    variables_at: float
    """how many values may come by position before one lands in `variables`, which comes by name"""
    foreign: bool
    """whether it insists on a keyword that no form has"""


def _read_signature(grad_fn: Callable[..., Any]) -> Signature:
    try:
        parameters = inspect.signature(grad_fn).parameters.values()
    except ValueError:  # a function written in C tells nothing: it gets what most rules get, one upstream
        return Signature(1, 1, None, None, _MANY, False)
    required, accepted, upstream_at, variables, variables_at, foreign = 0, 0.0, None, None, _MANY, False
    for p in parameters:
        needed = p.default is p.empty
        if p.kind is p.VAR_POSITIONAL:
            accepted = _MANY
        elif p.kind is p.VAR_KEYWORD:
            variables = variables or False
        elif p.name == "variables":
            variables = needed
            if p.kind is not p.KEYWORD_ONLY:
                variables_at = -1 if p.kind is p.POSITIONAL_ONLY else accepted
        elif p.kind is p.KEYWORD_ONLY:
            if p.name == "upstream":
                upstream_at = _MANY
            else:
                foreign |= needed
        else:
            if p.name == "upstream" and p.kind is not p.POSITIONAL_ONLY:
                upstream_at = accepted
            required += needed
            accepted += 1
    return Signature(required, accepted, upstream_at, variables, variables_at, foreign)


Form = Literal["structured", "arguments", "flat"]
"""The three ways to hand a rule its upstream gradients: grad(upstream), structured as the output; grad(*args,
upstream=...), structured so too; and grad(d1, d2, ...), one a tensor output."""


def form_of(signature: Signature, arguments: int, outputs: int) -> Form | None:
    """The form that a rule of this signature is written in, None where it fits none."""
    form = _form_by_count(signature, arguments, outputs)
    by_position = {"structured": 1, "arguments": arguments, "flat": outputs, None: 0}[form]
    return None if signature.foreign or by_position > signature.variables_at else form


def _form_by_count(signature: Signature, arguments: int, outputs: int) -> Form | None:
    required, accepted, upstream_at, *_ = signature
    if upstream_at is None or upstream_at == 0:
        if (required == 1 and (accepted < _MANY or upstream_at == 0)) or (required, accepted) == (0, 1):
            return "structured"
        return "flat" if upstream_at is None and required <= outputs <= accepted else None
    if upstream_at == _MANY:
        return "arguments" if required <= arguments <= accepted else None
    return "arguments" if arguments == upstream_at and required <= arguments + 1 else None


Convention = tuple[Form | None, bool | None]
"""The form of a grad_fn (None where it fits none), and whether it takes, and has to have, variables."""


def convention_of(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    """How grad_fn is written; a plain function is read once for all its closures."""
    if not isinstance(grad_fn, FunctionType) or hasattr(grad_fn, "__wrapped__"):  # a decorated function lies
        return _read_convention(grad_fn, arguments, outputs)
    code = grad_fn.__code__
    try:
        keyword_defaults = tuple(grad_fn.__kwdefaults__ or ())
        defaults = len(grad_fn.__defaults__ or ())
    except AttributeError:  # under torch.compile, which hides them: then all but the upstream gradients have one
        keyword_defaults = code.co_varnames
        positional = code.co_varnames[: code.co_argcount]
        obvious = "upstream" in positional or len(positional) - ("variables" in positional) <= 1
        defaults = int(positional[-1:] == ("variables",)) if obvious else len(grad_fn.__defaults__ or ())
    return _convention_of_code(code, defaults, keyword_defaults, arguments, outputs)


@constant_when_traced
def _convention_of_code(*key: Any) -> Convention:
    if key not in _conventions:
        code, defaults, keyword_defaults, arguments, outputs = key
        closure = tuple([CellType() for _ in code.co_freevars])
        like_it = FunctionType(code, {}, "", (None,) * defaults, closure)
        like_it.__kwdefaults__ = dict.fromkeys(keyword_defaults)
        _conventions[key] = _read_convention(like_it, arguments, outputs)
    return _conventions[key]


_conventions: dict[tuple[Any, ...], Convention] = {}


def _read_convention(grad_fn: Callable[..., Any], arguments: int, outputs: int) -> Convention:
    signature = _read_signature(grad_fn)
    return form_of(signature, arguments, outputs), signature.variables


# --- The rule of one run of f -----------------------------------------------------------------------------------


class Rule:
    """A grad_fn with its convention: flat upstream gradients in, flat and checked gradients out."""

    __slots__ = ("_call", "_form", "_output", "_variables", "dtypes", "grad_fn", "shapes")

    def __init__(self, call: Call, grad_fn: Callable[..., Any], output: Parts, inputs: Sequence[Tensor]) -> None:
        self._form, self._variables = convention_of(grad_fn, len(call.arguments), output.count)
        if self._form is None:
            raise CustomGradientTypeError(_no_form(call, grad_fn, output))
        self.grad_fn = grad_fn
        self._call = call
        self._output = output
        # What a gradient must fit is kept, and not the inputs: whoever keeps the rule would keep them alive.
        self.shapes = [x.shape for x in inputs]
        self.dtypes = [x.dtype for x in inputs]

    @property
    def needs_inputs(self) -> bool:
        """Whether grad_fn is called with f's arguments; where it is not, nobody has to keep them for it."""
        return self._form == "arguments"

    @property
    def takes_variables(self) -> bool:
        """Whether grad_fn has a parameter for the variables that f read."""
        return self._variables is not None

    @property
    def needs_variables(self) -> bool:
        """Whether grad_fn cannot be called without them."""
        return bool(self._variables)

    def with_grad_fn(self, grad_fn: Callable[..., Any]) -> Rule:
        """The same rule round another grad_fn of the same signature: one whose residuals were replaced."""
        rule = Rule.__new__(Rule)
        rule._call, rule._form, rule._variables, rule._output = self._call, self._form, self._variables, self._output
        rule.shapes, rule.dtypes, rule.grad_fn = self.shapes, self.dtypes, grad_fn
        return rule

    def require_variables(self, variables: Sequence[Tensor]) -> None:
        """Raise unless grad_fn takes variables, or f read none."""
        if variables and self._variables is None:
            for variable in variables:
                if self._call.option_of(variable) is not None:
                    self._call.refuse_captured(variable)
            raise CustomGradientTypeError(
                sentence(self._call.name, "grad_fn must take variables when f reads trainable state",
                         f"{_spelled(self.grad_fn)} and {listing([describe(v) for v in variables])}",
                         "write grad_fn(..., variables=None) and return (gradients, [one a variable]), "
                         "or pass the state as an argument")
            )  # fmt: skip

    def __call__(
        self, inputs: Sequence[Tensor], upstreams: Sequence[Tensor], variables: Sequence[Tensor] = ()
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The gradients of the inputs and of the variables; inputs may be empty unless the rule needs_inputs.

        upstreams holds a gradient for each tensor output: zeros where the output was not used, never None.
        """
        keywords = {"variables": list(variables)} if variables or self._variables else {}
        if self._form == "flat":
            result = self.grad_fn(*upstreams, **keywords)
        else:
            upstream = self._output.without_static().fill(upstreams)
            if self._form == "structured":
                result = self.grad_fn(upstream, **keywords)
            else:
                result = self.grad_fn(*fill_each(self._call.arguments, inputs), upstream=upstream, **keywords)
        if not keywords:
            return _gradients_of_arguments(self, self._without_variables(result)), []
        of_arguments, of_variables = _split(self._call, result)
        return (
            _gradients_of_arguments(self, of_arguments),
            _gradients_of_variables(self._call, of_variables, variables),
        )

    def _without_variables(self, result: Any) -> Any:
        """The gradients of the arguments alone, from a rule with `variables=None` that returns a pair all the same."""
        is_pair = self._variables is not None and isinstance(result, tuple) and len(result) == 2
        return result[0] if is_pair and isinstance(result[1], (list, tuple)) and not result[1] else result


def _no_form(call: Call, grad_fn: Callable[..., Any], output: Parts) -> str:
    arguments = len(call.arguments)
    return sentence(
        call.name, f"grad_fn must take its upstream gradients as {FORMS}",
        f"{_spelled(grad_fn)} for {_count(arguments, 'argument')} and {_count(output.count, 'tensor output')}",
        "write it in one of these forms",
    )  # fmt: skip


def _spelled(grad_fn: Callable[..., Any]) -> str:
    try:
        return f"{function_name(grad_fn)}{inspect.signature(grad_fn)}"
    except ValueError:
        return function_name(grad_fn)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- What it may return -----------------------------------------------------------------------------------------


def _gradients_of_arguments(rule: Rule, result: Any) -> list[Tensor | None]:
    """What grad_fn returned for f's arguments, as one checked gradient a tensor input."""
    call = rule._call
    gradients = zip(_align(call, result), rule.shapes, rule.dtypes, strict=True)
    return [
        gradient
        if _is_as(call.backend, gradient, shape, dtype)
        else check_gradient(call.name, call.backend, gradient, shape, dtype, partial(input_name, call, at))
        for at, (gradient, shape, dtype) in enumerate(gradients)
    ]


def _gradients_of_variables(call: Call, result: Any, variables: Sequence[Tensor]) -> list[Tensor | None]:
    """What grad_fn returned for the variables that it was given, as one checked gradient a variable."""
    gradients = [None] * len(variables) if result is None else result
    if not isinstance(gradients, (list, tuple)) or len(gradients) != len(variables):
        raise CustomGradientValueError(
            sentence(call.name, f"grad_fn must return one gradient for each of {_count(len(variables), 'variable')}",
                     describe(result), "return (gradients, [one a variable])")
        )  # fmt: skip
    return [
        check_gradient(
            call.name, call.backend, gradient, variable.shape, variable.dtype, partial("variables[{}]".format, at)
        )
        for at, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
    ]


def _split(call: Call, result: Any) -> tuple[Any, Any]:
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise CustomGradientValueError(
        sentence(call.name, "grad_fn with variables must return a pair (gradients, variable_gradients)",
                 describe(result), "return (gradients, [one a variable])")
    )  # fmt: skip


def _align(call: Call, result: Any) -> Sequence[Any]:
    """The leaves of what grad_fn returned, one a tensor input, whichever return form it chose."""
    if len(call.arguments) == 1 and (leaves := call.arguments[0].align(result)) is not None:
        return leaves
    for aligned in _readings(call, result):
        if aligned is not None:
            return aligned
    names = [name for name, parts in zip(call.names, call.arguments, strict=True) if parts.count]
    raise CustomGradientValueError(
        sentence(call.name, f"grad_fn must return one gradient for each argument ({', '.join(names)})",
                 describe_tree(result), "return them in order, each None, a tensor, or structured as its argument")
    )  # fmt: skip


def _readings(call: Call, result: Any) -> Iterator[Sequence[Any] | None]:
    """The ways to read a result, the most literal first: one an argument, one an argument that holds a tensor, flat."""
    holding = [parts for parts in call.arguments if parts.count]
    total = sum(parts.count for parts in call.arguments)
    several = isinstance(result, (list, tuple)) and _is_in_order(call, fields_of(result) or ())
    if several and len(result) == len(call.arguments) and not _feeds_what_is_static(call, result):
        yield _align_each(call.arguments, result)
    if several and len(result) == len(holding):
        yield _align_each(holding, result)
    if len(holding) == 1:
        yield holding[0].align(result)
    flat = several and fields_of(result) is None
    if flat and len(result) == total and not any(isinstance(g, (list, tuple, dict)) for g in result):
        yield result
    if several and len(result) == len(call.arguments):
        yield _align_each(call.arguments, result)
    if result is None:
        yield [None] * total


def _is_in_order(call: Call, fields: Sequence[str]) -> bool:
    """Whether the fields of a namedtuple that are called as arguments come in the order of these."""
    places = [call.names.index(field) for field in fields if field in call.names]
    return places == sorted(places)


def _feeds_what_is_static(call: Call, result: Sequence[Any]) -> bool:
    """Whether a gradient would go to an argument that holds no tensor, as when the result is flat."""
    return any(not parts.count and g is not None for parts, g in zip(call.arguments, result, strict=True))


def _align_each(arguments: Sequence[Parts], gradients: Sequence[Any]) -> list[Any] | None:
    aligned: list[Any] = []
    for parts, gradient in zip(arguments, gradients, strict=True):
        leaves = parts.align(gradient)
        if leaves is None:
            return None
        aligned += leaves
    return aligned


def input_name(call: Call, at: int) -> str:
    """What a reader calls a tensor input: its argument's name and the path inside it."""
    paths = [path for name, parts in zip(call.names, call.arguments, strict=True) for path in parts.paths(name)]
    return paths[at]


# --- What fits --------------------------------------------------------------------------------------------------


def check_gradient(
    op: str, backend: Backend, gradient: Any, shape: Any, dtype: Any, of: Callable[[], str]
) -> Tensor | None:
    """A gradient that fits the tensor that it is the gradient of, in the tensor's dtype; None where there is none."""
    if gradient is None or not is_differentiable(dtype):
        return None
    if _is_as(backend, gradient, shape, dtype):
        return gradient
    tensor = as_tensor(op, backend, gradient)
    if tensor is None:
        if not isinstance(gradient, (int, float, complex)):
            raise CustomGradientTypeError(
                sentence(op, f"the gradient of {of()} must be a tensor or None", describe(gradient),
                         "return None where there is no gradient")
            )  # fmt: skip
        tensor = backend.convert_to_tensor(gradient, None if isinstance(gradient, complex) else dtype)
    if not fits(tensor.shape, shape):
        raise CustomGradientValueError(
            sentence(op, f"the gradient of {of()} must have its shape {describe_spec(shape, dtype)}",
                     describe(tensor), "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule")
        )  # fmt: skip
    if tensor.dtype == dtype:
        return tensor
    if is_complex(tensor.dtype) and not is_complex(dtype):
        raise CustomGradientValueError(
            sentence(op, f"the gradient of {of()} must be real as it is ({describe_spec(shape, dtype)})",
                     describe(tensor), "take the real part in the rule")
        )  # fmt: skip
    return backend.convert_to_tensor(tensor, dtype)


def _is_as(backend: Backend, gradient: Any, shape: Any, dtype: Any) -> bool:
    """Whether a gradient is just what it has to be, as nearly all are."""
    return (
        backend.is_tensor(gradient) and gradient.dtype == dtype and gradient.shape == shape and is_differentiable(dtype)
    )


def fits(shape: Any, expected: Any) -> bool:
    """Whether two shapes are the same as far as they are known; nothing is broadcast."""
    got, wanted = shape_of(shape), shape_of(expected)
    if ... in got or ... in wanted:
        return True
    return len(got) == len(wanted) and all(m is None or n is None or m == n for m, n in zip(got, wanted, strict=True))


@constant_when_traced
def is_differentiable(dtype: Any) -> bool:
    """Whether tensors of this dtype have gradients: the floats and the complex numbers."""
    if dtype not in _differentiable:
        _differentiable[dtype] = dtype_name(dtype).startswith(("float", "bfloat", "complex"))
    return _differentiable[dtype]


_differentiable: dict[Any, bool] = {}
