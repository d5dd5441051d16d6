"""What f reads without being given it: trainable state, other tensors that are differentiated, and constants."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import cgshim
from cgshim import CustomGradientTypeError, op_custom_gradient
from cgshim._protocol import Tensor
from cgshim.testing.conformance._framework import Framework, Gradients, raised
from cgshim.testing.conformance._registry import case

Rule = Callable[..., Any]
"""`rule(upstream, variables)`: the gradient of x and those of the variables"""

TAKING_VARIABLES: dict[str, Callable[[Rule], Rule]] = {
    "grad(upstream, variables)": lambda rule: lambda upstream, variables: rule(upstream, variables),
    "grad(upstream, variables=None)": lambda rule: lambda upstream, variables=None: rule(upstream, variables),
    "grad(dy, *, variables)": lambda rule: lambda dy, *, variables: rule(dy, variables),
    "grad(upstream, **kwargs)": lambda rule: lambda upstream, **kwargs: rule(upstream, **kwargs),
    "grad(*dys, variables)": lambda rule: lambda *dys, variables: rule(dys[0], variables),
    "grad(*dys, **kwargs)": lambda rule: lambda *dys, **kwargs: rule(dys[0], **kwargs),
    "grad(x, upstream, variables=None)": lambda rule: lambda x, upstream, variables=None: rule(upstream, variables),
    "grad(*args, upstream, variables)": lambda rule: lambda *args, upstream, variables: rule(upstream, variables),
    "grad(*args, upstream, **kwargs)": lambda rule: lambda *args, upstream, **kwargs: rule(upstream, **kwargs),
}


def _reads(w: Tensor, write: Callable[[Rule], Rule], rule: Rule) -> Callable[[Tensor], Tensor]:
    """An op of x alone, whose f reads w."""
    return op_custom_gradient(lambda x: (x * w, write(rule)))


def _reads_untold(w: Tensor) -> Callable[[Tensor], Tensor]:
    """An op of x alone, whose f reads w, and whose rule takes no variables."""
    return op_custom_gradient(lambda x: (x * w, lambda upstream: upstream))


@case(write=TAKING_VARIABLES)
def variables(framework: Framework, write: Callable[[Rule], Rule]) -> None:
    """The state that f read arrives, and the rule's gradients for it are used: 11 is wrong on purpose."""
    x = framework.tensor([1.0, 2.0])

    def fn(w: Tensor) -> Tensor:
        def rule(upstream: Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            assert framework.is_state(variables[0], w)
            return 7.0 * upstream, [11.0 * upstream[0] * x[0] + 13.0 * upstream[1] * x[1]]

        return _reads(w, write, rule)(x)

    output, pullback = framework.differentiate_state(fn, framework.tensor(5.0))
    framework.check_equal(output, np.array([5.0, 10.0]))
    framework.check_equal(pullback(framework.tensor([2.0, -3.0])), (np.array(-56.0),))


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
    _, pullback = framework.differentiate_state(
        lambda w: _reads(w, TAKING_VARIABLES["grad(upstream, variables)"], lambda u, _: (u, write(11.0 * u)))(x),
        framework.tensor(5.0),
    )
    framework.check_equal(pullback(framework.tensor(3.0)), (np.array(expected),))


@case()
def two_variables(framework: Framework) -> None:
    """Each arrives once, and each gets its own gradient."""
    x = framework.tensor([1.0, 2.0])

    def fn(a: Tensor, b: Tensor) -> Tensor:
        def rule(upstream: Tensor, variables: Any) -> Any:
            gradients = {(): 7.0 * upstream[0], (2,): 11.0 * upstream}
            return upstream, [gradients[tuple(variable.shape)] for variable in variables]

        return op_custom_gradient(lambda x: (x * a + b, lambda upstream, variables: rule(upstream, variables)))(x)

    _, pullback = framework.differentiate_state(fn, framework.tensor(5.0), framework.tensor([1.0, 1.0]))
    gradients = pullback(framework.tensor([2.0, -3.0]))
    framework.check_equal(gradients, (np.array(14.0), np.array([22.0, -33.0])))


@case()
def variables_beside_arguments(framework: Framework) -> None:
    """State that f reads and state that it is given, in one call."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        def rule(upstream: Tensor, variables: Any) -> Any:
            assert len(variables) == 1
            return 7.0 * upstream, [11.0 * upstream[0]]

        return _reads(w, TAKING_VARIABLES["grad(upstream, variables)"], rule)(x)

    _, pullback = framework.differentiate_state(fn, framework.tensor(5.0), framework.tensor([1.0, 2.0]))
    gradients = pullback(framework.tensor([2.0, -3.0]))
    framework.check_equal(gradients, (np.array(22.0), np.array([14.0, -21.0])))


def refused(differentiate: Gradients, fn: Callable[..., Tensor], *values: Tensor) -> BaseException:
    """The error of a call, or at the latest of its pullback: a framework may not know sooner what is differentiated."""

    def differentiated() -> None:
        output, pullback = differentiate(fn, *values)
        pullback(output)

    return raised(CustomGradientTypeError, differentiated)


@case()
def state_without_variables(framework: Framework) -> None:
    """A rule that cannot be told of the state that f read is refused."""
    x = framework.tensor([1.0, 2.0])
    error = refused(framework.differentiate_state, lambda w: _reads_untold(w)(x), framework.tensor(5.0))
    assert "as an argument" in str(error)


@case()
def state_read_by_an_op_inside(framework: Framework) -> None:
    """What an inner op reads, f reads: the inner rule, which takes variables, does not speak for the outer one."""
    x = framework.tensor([1.0, 2.0])

    def fn(w: Tensor) -> Tensor:
        inner = _reads(w, TAKING_VARIABLES["grad(upstream, variables)"], lambda upstream, _: (upstream, [upstream[0]]))
        return op_custom_gradient(lambda x: (inner(x), lambda upstream: upstream))(x)

    error = refused(framework.differentiate_state, fn, framework.tensor(5.0))
    assert "as an argument" in str(error)


@case()
def captured_tensor_that_is_differentiated(framework: Framework) -> None:
    """Never a silent zero: what is differentiated must come in as an argument."""
    x = framework.tensor([1.0, 2.0])
    error = refused(cgshim.op_vjp, lambda w: _reads_untold(w)(x), framework.tensor(5.0))
    assert "as an argument" in str(error)


@case()
def captured_tensor_beside_a_differentiated_argument(framework: Framework) -> None:
    w, x = framework.tensor(5.0), framework.tensor([1.0, 2.0])
    error = refused(cgshim.op_vjp, lambda w, x: _reads_untold(w)(x), w, x)
    assert "as an argument" in str(error)


class AuthorsError(Exception):
    """What goes wrong in a rule."""


def _rule_that_returns(upstream: Tensor) -> Tensor:
    return 7.0 * upstream


def _rule_that_raises(upstream: Tensor) -> Tensor:
    raise AuthorsError


@case(rule={"returns": _rule_that_returns, "raises": _rule_that_raises})
def captured_function_of_the_argument(framework: Framework, rule: Callable[[Tensor], Tensor]) -> None:
    """It is a constant to an op that a rule calls, and to no other: not to one that is called after a rule has run."""
    x = framework.tensor([1.0, 2.0])

    def squares(x: Tensor) -> Tensor:
        return _reads_untold(x * x)(x)

    for _ in range(2):
        assert "as an argument" in str(refused(cgshim.op_vjp, squares, x))
        _, pullback = cgshim.op_vjp(op_custom_gradient(lambda x: (x * x, rule)), x)
        with contextlib.suppress(AuthorsError):
            pullback(x)


@case()
def captured_tensor_without_an_argument(framework: Framework) -> None:
    """Where f is given no tensor, nobody knows its framework in time: not even a rule that takes variables may run."""

    def twice(w: Tensor) -> Tensor:
        op = op_custom_gradient(lambda factor: (w * factor, lambda upstream, variables: (None, [7.0 * upstream])))
        return op(2.0)

    for differentiate in (cgshim.op_vjp, framework.differentiate_state):
        error = refused(differentiate, twice, framework.tensor(5.0))
        assert "as an argument" in str(error)
    framework.check_equal(twice(framework.tensor(5.0)), np.array(10.0))


@case()
def option_that_is_differentiated(framework: Framework) -> None:
    """An option has no gradient: a tensor that is differentiated and comes as one is refused, not given zero."""

    @op_custom_gradient
    def op(x: Tensor, *, power: int = 1, scale: Any) -> Any:
        return x * scale["a"][power], lambda upstream: 7.0 * upstream

    x = framework.tensor([1.0, 2.0])

    def scaled(scale: Tensor) -> Tensor:
        return op(x, scale={"a": ["static", scale]})

    for differentiate in (cgshim.op_vjp, framework.differentiate_state):
        error = refused(differentiate, scaled, framework.tensor(5.0))
        assert str(error) == (
            "op: f must be given every tensor that is differentiated, got f32[] in the option scale; "
            "pass it as an argument"
        ), str(error)
    framework.check_equal(scaled(framework.tensor(5.0)), np.array([5.0, 10.0]))


@case()
def captured_tensor_beside_an_option(framework: Framework) -> None:
    """An option that nobody differentiates is not blamed for a captured tensor that somebody does."""

    def twice(w: Tensor) -> Tensor:
        op = op_custom_gradient(lambda x, *, scale: (x * w * scale, lambda upstream: upstream))
        return op(framework.tensor([1.0, 2.0]), scale=framework.tensor(2.0))

    for differentiate in (cgshim.op_vjp, framework.differentiate_state):
        error = refused(differentiate, twice, framework.tensor(5.0))
        assert "as an argument" in str(error)
        assert "option" not in str(error)


@case()
def captured_constant(framework: Framework) -> None:
    """Capturing what nobody differentiates is fine, in f and in its rule."""
    constant = framework.tensor([3.0, 4.0])
    op = op_custom_gradient(lambda x: (x * constant, lambda u: 7.0 * u * constant))
    framework.check(
        op, framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([3.0, 8.0]), gradients=(np.array([42.0, -84.0]),),
    )  # fmt: skip


@case()
def captured_tensor_made_a_constant(framework: Framework) -> None:
    """A differentiated tensor under stop_gradient is a constant, which f may read; its gradient is zero."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        constant = cgshim.op_stop_gradient(w)
        return op_custom_gradient(lambda x: (x * constant, lambda u: 7.0 * u * constant))(x)

    framework.check(
        fn, framework.tensor(5.0), framework.tensor([1.0, 2.0]), upstream=framework.tensor([2.0, -3.0]),
        output=np.array([5.0, 10.0]), gradients=(np.array(0.0), np.array([70.0, -105.0])),
    )  # fmt: skip


@dataclasses.dataclass
class Unknown:
    """An object that no registry takes apart."""

    held: Any


@case(returns={"a tensor": lambda y: y, "an object": Unknown, "an object in a list": lambda y: [Unknown([y])]})
def tensor_in_an_object(framework: Framework, returns: Callable[[Tensor], Any]) -> None:
    """No tensor is seen among the arguments: autodiff's number is refused, and a constant is not."""
    op = op_custom_gradient(lambda given: (returns(given.held * 2.0), lambda u: 7.0 * u))

    def twice(x: Tensor) -> Tensor:
        found: Any = op(Unknown(x))
        while not framework.backend.is_tensor(found):
            found = found[0] if isinstance(found, list) else found.held
        return found

    error = refused(cgshim.op_vjp, twice, framework.tensor([1.0, 2.0]))
    assert "as an argument" in str(error)
    framework.check_equal(twice(framework.tensor([1.0, 2.0])), np.array([2.0, 4.0]))
