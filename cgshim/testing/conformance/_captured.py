"""Captured tensors of f: trainable state, other differentiated tensors, and constants."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import op_custom_gradient
from cgshim._dtypes import dtype_name
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import (
    OF_Y,
    AuthorsError,
    Pair,
    Record,
    U,
    X,
    Y,
    wrong_gradients,
)
from cgshim.testing.conformance._framework import Framework, refused
from cgshim.testing.conformance._registry import case

Rule = Callable[..., Any]
"""`rule(upstream, variables)`: the gradient of x and the gradients of the variables"""

TAKING_VARIABLES: dict[str, Callable[[Rule], Rule]] = {
    "grad(upstream, variables)": lambda rule: lambda upstream, variables: rule(upstream, variables),
    "grad(upstream, variables=None)": lambda rule: (
        lambda upstream, variables=None: rule(upstream, variables)
    ),
    "grad(dy, *, variables)": lambda rule: lambda dy, *, variables: rule(dy, variables),
    "grad(upstream, **kwargs)": lambda rule: lambda upstream, **kwargs: rule(upstream, **kwargs),
    "grad(*dys, variables)": lambda rule: lambda *dys, variables: rule(dys[0], variables),
    "grad(*dys, **kwargs)": lambda rule: lambda *dys, **kwargs: rule(dys[0], **kwargs),
    "grad(x, upstream, variables=None)": lambda rule: (
        lambda x, upstream, variables=None: rule(upstream, variables)
    ),
    "grad(*args, upstream, variables)": lambda rule: (
        lambda *args, upstream, variables: rule(upstream, variables)
    ),
    "grad(*args, upstream, **kwargs)": lambda rule: (
        lambda *args, upstream, **kwargs: rule(upstream, **kwargs)
    ),
}


def _reads(w: Tensor, write: Callable[[Rule], Rule], rule: Rule) -> Callable[[Tensor], Tensor]:
    """An op of only x, whose f reads w."""
    return op_custom_gradient(lambda x: (x * w, write(rule)))


def _reads_without_variables(w: Tensor) -> Callable[[Tensor], Tensor]:
    """An op of only x, whose f reads w, and whose rule takes no variables."""
    return op_custom_gradient(lambda x: (x * w, lambda upstream: upstream))


@case(write=TAKING_VARIABLES)
def variables(framework: Framework, write: Callable[[Rule], Rule]) -> None:
    """The rule gets the state that f reads, and its gradients are used: 11 is wrong on purpose."""
    x = framework.tensor(X)

    def fn(w: Tensor) -> Tensor:
        def rule(upstream: Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            assert framework.is_state(variables[0], w)
            of_x, of_w = wrong_gradients(x, w, upstream)
            return of_x, [of_w]

        return _reads(w, write, rule)(x)

    framework.check_state(fn, Y, upstream=U, output=X * Y, gradients=(OF_Y,))


VARIABLE_GRADIENTS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "a list": (lambda g: [g], 33.0),
    "a tuple": (lambda g: (g,), 33.0),
    "a list of None": (lambda g: [None], 0.0),
    "None": (lambda g: None, 0.0),
}


@case(form=VARIABLE_GRADIENTS)
def gradients_of_variables(framework: Framework, form: tuple[Callable[[Any], Any], float]) -> None:
    write, expected = form
    x = framework.tensor(2.0)
    form_of_rule = TAKING_VARIABLES["grad(upstream, variables)"]
    fn = lambda w: _reads(w, form_of_rule, lambda u, _: (u, write(11.0 * u)))(x)
    framework.check_state(fn, Y, upstream=3.0, gradients=(expected,))


@case()
def variables_beside_arguments(framework: Framework) -> None:
    """Captured state and state as an argument, in one call."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        def rule(upstream: Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            return 7.0 * upstream, [11.0 * upstream[0]]

        return _reads(w, TAKING_VARIABLES["grad(upstream, variables)"], rule)(x)

    framework.check_state(fn, Y, X, upstream=U, gradients=(11.0 * U[0], 7.0 * U))


@case()
def state_without_variables(framework: Framework) -> None:
    """A rule without variables raises an error if f reads state."""
    x, w = framework.tensor(X), framework.tensor(Y)
    refused(lambda w: _reads_without_variables(w)(x), w, by=framework.differentiate_state)


@case()
def state_read_by_an_op_inside(framework: Framework) -> None:
    """f reads the state that an inner op reads; the inner rule's variables do not cover the outer
    rule.
    """
    x, w = framework.tensor(X), framework.tensor(Y)

    def fn(w: Tensor) -> Tensor:
        inner = _reads(
            w,
            TAKING_VARIABLES["grad(upstream, variables)"],
            lambda upstream, _: (upstream, [upstream[0]]),
        )
        return op_custom_gradient(lambda x: (inner(x), lambda upstream: upstream))(x)

    refused(fn, w, by=framework.differentiate_state)


@case()
def captured_tensor_that_is_differentiated(framework: Framework) -> None:
    """A captured differentiated tensor raises an error, and never has a silent zero gradient."""
    x, w = framework.tensor(X), framework.tensor(Y)
    refused(lambda w: _reads_without_variables(w)(x), w)


@case()
def captured_tensor_beside_a_differentiated_argument(framework: Framework) -> None:
    x, w = framework.tensor(X), framework.tensor(Y)
    refused(lambda w, x: _reads_without_variables(w)(x), w, x)


def _rule_that_raises(upstream: Tensor) -> Tensor:
    raise AuthorsError


@case(rule={"returns": lambda upstream: 7.0 * upstream, "raises": _rule_that_raises})
def captured_function_of_the_argument(
    framework: Framework, rule: Callable[[Tensor], Tensor]
) -> None:
    """The argument's function is a constant to an op within a rule, and not after a rule has run."""
    x = framework.tensor(X)

    def squares(x: Tensor) -> Tensor:
        return _reads_without_variables(x * x)(x)

    for _ in range(2):
        refused(squares, x)
        _, pullback = cgshim.op_vjp(op_custom_gradient(lambda x: (x * x, rule)), x)
        with contextlib.suppress(AuthorsError):
            pullback(x)


def refused_in_both_ways(framework: Framework, fn: Callable[[Tensor], Any]) -> list[BaseException]:
    """The errors of fn's derivative by an argument, and by trainable state."""
    w = framework.tensor(Y)
    return [refused(fn, w, by=by) for by in (cgshim.op_vjp, framework.differentiate_state)]


@case()
def captured_tensor_without_an_argument(framework: Framework) -> None:
    """Without a tensor and a chosen backend the framework is unknown, so f's captured state raises.

    This holds for a rule that takes variables too.
    """

    def twice(w: Tensor) -> Tensor:
        op = op_custom_gradient(
            lambda factor: (w * factor, lambda upstream, variables: (None, [7.0 * upstream]))
        )
        return op(2.0)

    refused_in_both_ways(framework, twice)
    framework.check_equal(twice(framework.tensor(Y)), 2.0 * Y)


@case()
def state_read_without_an_argument(framework: Framework) -> None:
    """A chosen backend is the framework of a call without tensors."""

    def twice(w: Tensor) -> Tensor:
        op = op_custom_gradient(
            lambda factor: (w * factor, lambda upstream, variables: (None, [7.0 * upstream]))
        )
        with cgshim.use_backend(framework.name):
            return op(2.0)

    framework.check_state(twice, Y, upstream=U[0], output=2.0 * Y, gradients=(7.0 * U[0],))
    framework.check_equal(twice(framework.tensor(Y)), 2.0 * Y)


@case()
def option_that_is_differentiated(framework: Framework) -> None:
    """An option has no gradient: a differentiated tensor as an option raises an error."""

    @op_custom_gradient
    def op(x: Tensor, *, power: int = 1, scale: Any) -> Any:
        return x * scale["a"][power], lambda upstream: 7.0 * upstream

    x = framework.tensor(X)

    def scaled(scale: Tensor) -> Tensor:
        return op(x, scale={"a": ["static", scale]})

    for error in refused_in_both_ways(framework, scaled):
        assert str(error) == (
            "op: f must be given every tensor that is differentiated, got f32[] in the option scale; "
            "pass it as an argument"
        ), str(error)
    framework.check_equal(scaled(framework.tensor(Y)), X * Y)


@case()
def captured_tensor_beside_an_option(framework: Framework) -> None:
    """The error for a captured tensor does not blame a constant option."""

    def twice(w: Tensor) -> Tensor:
        op = op_custom_gradient(lambda x, *, scale: (x * w * scale, lambda upstream: upstream))
        return op(framework.tensor(X), scale=framework.tensor(2.0))

    for error in refused_in_both_ways(framework, twice):
        assert "option" not in str(error)


@case()
def captured_constant(framework: Framework) -> None:
    """f and its rule may capture constants."""
    c = np.array([3.0, 4.0])
    constant = framework.tensor(c)
    op = op_custom_gradient(lambda x: (x * constant, lambda u: 7.0 * u * constant))
    framework.check_at(op, X, upstream=U, output=X * c, gradients=(7.0 * U * c,))


@case()
def captured_tensor_made_a_constant(framework: Framework) -> None:
    """A tensor under stop_gradient is a constant, which f may read; its gradient is zero."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        constant = cgshim.op_stop_gradient(w)
        return op_custom_gradient(lambda x: (x * constant, lambda u: 7.0 * u * constant))(x)

    framework.check_at(fn, Y, X, upstream=U, output=X * Y, gradients=(0.0, 7.0 * U * Y))


@case(
    returns={
        "a tensor": lambda y: y,
        "an object": Record,
        "an object in a list": lambda y: [Record([y])],
    }
)
def tensor_in_an_object(framework: Framework, returns: Callable[[Tensor], Any]) -> None:
    """A tensor in an object is not found: a differentiated one raises an error, a constant does
    not.
    """
    op = op_custom_gradient(lambda record: (returns(record.held * 2.0), lambda u: 7.0 * u))

    def twice(x: Tensor) -> Tensor:
        output: Any = op(Record(x))
        while not framework.backend.is_tensor(output):
            output = output[0] if isinstance(output, list) else output.held
        return output

    refused(twice, framework.tensor(X))
    framework.check_equal(twice(framework.tensor(X)), 2.0 * X)


# --- NumPy arrays given to an f that computes in the framework ------------------------------------

OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "one": lambda y, z: y,
    "two": lambda y, z: (y, z),
    "a dict": lambda y, z: {"y": y, "z": z},
    "a namedtuple in a list": lambda y, z: [Pair(y, z)],
    "with None and what is static": lambda y, z: {"y": (y, None, "static"), "n": 3},
    "twice the same": lambda y, z: [y, y],
}
"""f's output, built from two new tensors"""


def first_tensor(framework: Framework, tree: Any) -> Tensor:
    """The first item in a tree of tensors and static leaves."""
    leaves, _ = framework.backend.tree_flatten(tree)
    return next(filter(framework.backend.is_tensor, leaves))


def _no_rule(upstream: Any) -> Any:
    raise AssertionError("a constant has no gradient")


@case(pack=OUTPUTS)
def numpy_arrays_alone(framework: Framework, pack: Callable[[Any, Any], Any]) -> None:
    """The output is the framework's, also in a differentiated function; the rule never runs."""

    @op_custom_gradient
    def op(array: Any, tree: Any, mode: Any = None, *, scale: float = 1.0) -> Any:
        assert isinstance(array, np.ndarray)
        y = framework.tensor(array * scale)
        return pack(y, y * framework.tensor(tree["b"])), _no_rule

    array, tree = X.astype("float32"), {"b": np.array([3.0, 5.0], "float32")}
    framework.check_equal(op(array, tree, scale=4.0), pack(4.0 * X, 4.0 * X * tree["b"]))
    product = lambda x: x * first_tensor(framework, op(array, tree, scale=4.0))
    x = np.array([1.0, 10.0])
    framework.check_at(product, x, upstream=U, output=x * 4.0 * X, gradients=(U * 4.0 * X,))


@case(pack=OUTPUTS)
def numpy_arrays_beside_a_captured_tensor(
    framework: Framework, pack: Callable[[Any, Any], Any]
) -> None:
    """A captured differentiated tensor raises an error, wherever in the output it is."""

    def read(w: Tensor) -> Tensor:
        op = op_custom_gradient(
            lambda a: (pack(framework.tensor(a) * w, framework.tensor(a)), _no_rule)
        )
        return first_tensor(framework, op(X.astype("float32")))

    refused_in_both_ways(framework, read)
    framework.check_equal(read(framework.tensor(5.0)), 5.0 * X)


@case(dtype={"float32": "float32", "int32": "int32", "complex64": "complex64"})
def numpy_array_of_another_byte_order(framework: Framework, dtype: str) -> None:
    """It is a constant, with its own numbers."""
    swapped = np.array([3.0, 4.0]).astype(np.dtype(dtype).newbyteorder())

    @op_custom_gradient
    def op(x: Tensor, constant: Tensor) -> Any:
        assert framework.backend.is_tensor(constant)
        assert dtype_name(constant.dtype) == dtype
        return (x * 2.0, constant), lambda u: (7.0 * u[0], None)

    framework.check_equal(op(framework.tensor(X), swapped), (2.0 * X, np.array([3.0, 4.0])))
    framework.check_at(lambda x: op(x, swapped)[0], X, upstream=U, gradients=(7.0 * U,))
