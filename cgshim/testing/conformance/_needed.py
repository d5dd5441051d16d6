"""needs_input_grad: f and grad_fn learn which arguments need a gradient.

A backend that cannot tell may pass True. It must never pass False for a gradient that is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from cgshim import CustomGradientTypeError, CustomGradientValueError, op_custom_gradient, op_vjp
from cgshim._protocol import Tensor
from cgshim.testing.conformance._common import OF_X, OF_Y, U, X, Y, check_product, wrong_gradients
from cgshim.testing.conformance._framework import Framework, raised, tangent
from cgshim.testing.conformance._registry import case

Rule = Callable[..., Any]
"""`rule(upstream, needed)`: the gradients of both arguments"""

TAKING_NEEDED: dict[str, Callable[[Rule], Rule]] = {
    "grad(upstream, needs_input_grad)": lambda rule: (
        lambda upstream, needs_input_grad: rule(upstream, needs_input_grad)
    ),
    "grad(dy, *, needs_input_grad)": lambda rule: (
        lambda dy, *, needs_input_grad: rule(dy, needs_input_grad)
    ),
    "grad(dy, needs_input_grad=None)": lambda rule: (
        lambda dy, needs_input_grad=None: rule(dy, needs_input_grad)
    ),
    "grad(dy, needs_input_grad, variables=None)": lambda rule: (
        lambda dy, needs_input_grad, variables=None: rule(dy, needs_input_grad)
    ),
    "grad(dy, variables, needs_input_grad)": lambda rule: (
        lambda dy, variables, needs_input_grad: (rule(dy, needs_input_grad), variables)
    ),
    "grad(dy, *, needs_input_grad, **kwargs)": lambda rule: (
        lambda dy, *, needs_input_grad, **kwargs: rule(dy, needs_input_grad)
    ),
    "grad(*args, upstream, needs_input_grad)": lambda rule: (
        lambda *args, upstream, needs_input_grad: rule(upstream, needs_input_grad)
    ),
    "grad(x, y, upstream, needs_input_grad)": lambda rule: (
        lambda x, y, upstream, needs_input_grad: rule(upstream, needs_input_grad)
    ),
    "grad(x, y, needs_input_grad, upstream)": lambda rule: (
        lambda x, y, needs_input_grad, upstream: rule(upstream, needs_input_grad)
    ),
    "grad(*dys, needs_input_grad)": lambda rule: (
        lambda *dys, needs_input_grad: rule(dys[0], needs_input_grad)
    ),
    "grad(dy, **kwargs)": lambda rule: (
        lambda dy, **kwargs: rule(dy, kwargs.get("needs_input_grad", (True, True)))
    ),
}


@case(write=TAKING_NEEDED)
def needed_form(framework: Framework, write: Callable[[Rule], Rule]) -> None:
    """Each form of grad_fn gets a bool per argument: True for differentiated ones."""

    @op_custom_gradient
    def op(x: Tensor, y: Tensor) -> Any:
        def rule(upstream: Tensor, needed: Any) -> Any:
            assert needed == (True, True)
            return wrong_gradients(x, y, upstream)

        return x * y, write(rule)

    check_product(framework, op)


Asked = tuple[bool, bool]

ASKED: dict[str, Asked] = {
    "the first": (True, False),
    "the second": (False, True),
    "both": (True, True),
}
"""which arguments are differentiated"""


def _of_asked(framework: Framework, op: Callable[..., Tensor], asked: Asked) -> None:
    """Check the gradients of these arguments; the others are constants."""
    arguments = framework.tensors((X, Y))

    def of_asked(*differentiated: Tensor) -> Tensor:
        rest = iter(differentiated)
        return op(
            *[next(rest) if is_asked else x for x, is_asked in zip(arguments, asked, strict=True)]
        )

    moving, gradients = (
        tuple(itertools.compress(each, asked)) for each in (arguments, (OF_X, OF_Y))
    )
    framework.check_at(of_asked, *moving, upstream=U, output=X * Y, gradients=gradients)


def _covers(needed: Any, asked: Asked) -> bool:
    """Return True if the flags of both arguments are bools, and True for differentiated ones."""
    covered = [flag or not is_asked for flag, is_asked in zip(needed, asked, strict=True)]
    return set(map(type, needed)) == {bool} and all(covered)


@case(asked=ASKED)
def needed_by_grad_fn(framework: Framework, asked: Asked) -> None:
    """A rule that skips unneeded gradients returns all needed ones."""

    @op_custom_gradient
    def op(x: Tensor, y: Tensor) -> Any:
        def grad(upstream: Tensor, needs_input_grad: Any) -> Any:
            assert _covers(needs_input_grad, asked)
            gradients = wrong_gradients(x, y, upstream)
            return [
                g if needed else None for g, needed in zip(gradients, needs_input_grad, strict=True)
            ]

        return x * y, grad

    _of_asked(framework, op, asked)


@case(asked=ASKED)
def needed_by_f(framework: Framework, asked: Asked) -> None:
    """f may compute gradients beside the output, as fused kernels do: the rule uses only these."""

    @op_custom_gradient
    def op(x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
        assert _covers(needs_input_grad, asked)
        made = [2.0 * x * y if needed else None for needed in needs_input_grad]

        def grad(upstream: Tensor, needs_input_grad: Any) -> Any:
            assert _covers(needs_input_grad, asked)
            for each, needed in zip(made, needs_input_grad, strict=True):
                assert each is not None or not needed
            of_x, of_y = wrong_gradients(x, y, upstream)
            return of_x if needs_input_grad[0] else None, of_y if needs_input_grad[1] else None

        return x * y, grad

    _of_asked(framework, op, asked)


@case(asked=ASKED)
def needed_by_f_alone(framework: Framework, asked: Asked) -> None:
    """Without the flags a rule may read None where f skipped a gradient; it is unused."""

    @op_custom_gradient
    def op(x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
        factor = 7.0 * y if needs_input_grad[0] else None
        is_needed = needs_input_grad[1]

        def grad(upstream: Tensor) -> Any:
            _, of_y = wrong_gradients(x, y, upstream)
            return None if factor is None else factor * upstream, of_y if is_needed else None

        return x * y, grad

    _of_asked(framework, op, asked)


@case()
def needed_by_nobody(framework: Framework) -> None:
    """f gets the flags too in a call that is not differentiated, and in a call without a tensor."""
    seen: list[Any] = []

    @op_custom_gradient
    def op(x: Any, factor: Any, *, needs_input_grad: Any = None) -> Any:
        seen.append(needs_input_grad)
        return factor * x, lambda upstream: factor * upstream

    framework.check_equal(op(framework.tensor([1.0, 2.0]), 3.0), np.array([3.0, 6.0]))
    assert op(2.0, 3.0) == 6.0
    ((of_x, of_factor), without_tensors) = seen
    assert type(of_x) is bool
    assert (of_factor, without_tensors) == (None, (None, None))


@case()
def needed_in_trees(framework: Framework) -> None:
    """A tree has a bool per tensor, and None for static leaves; integers need no gradient."""
    expected = ({"w": True, "at": False, "n": [None, True]}, None, True)

    @op_custom_gradient
    def op(
        params: Any, scale: float, x: Tensor, *, power: int, needs_input_grad: Any = None
    ) -> Any:
        assert needs_input_grad == expected
        assert power == 2

        def grad(upstream: Tensor, needs_input_grad: Any) -> Any:
            assert needs_input_grad == expected
            return (
                {"w": 7.0 * upstream * x, "at": None, "n": [None, 5.0 * upstream[0]]},
                None,
                11.0 * upstream,
            )

        return scale * params["w"] * x * params["n"][1], grad

    params, x = {"w": X, "at": np.array([3, 4], "int32"), "n": ["n", 2.0]}, np.array([5.0, 7.0])
    framework.check_at(
        lambda params, x: op(params, 3.0, x, power=2), params, x, upstream=U, output=3.0 * X * x * 2.0,
        gradients=({"w": 7.0 * U * x, "at": None, "n": [None, 5.0 * U[0]]}, 11.0 * U),
    )  # fmt: skip


class _Layer:
    @op_custom_gradient
    def op(self, x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
        assert needs_input_grad == (True, True)
        return x * y, lambda upstream, needs_input_grad: wrong_gradients(x, y, upstream)


@case()
def needed_in_a_method(framework: Framework) -> None:
    check_product(framework, _Layer().op)


@case()
def needed_and_variables(framework: Framework) -> None:
    """The flags are for arguments; the rule always returns a variable's gradient."""
    x, y = framework.tensor(2.0), framework.tensor(3.0)

    def fn(w: Tensor) -> Tensor:
        def f(x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
            def grad(upstream: Tensor, variables: Any, needs_input_grad: Any) -> Any:
                assert len(variables) == len(needs_input_grad) - 1 == 1
                return [None, None], [11.0 * upstream]

            return x * y * w, grad

        return op_custom_gradient(f)(x, y)

    framework.check_state(fn, 5.0, upstream=-3.0, output=30.0, gradients=(-33.0,))


# --- What the rule returns ------------------------------------------------------------------------


@case()
def none_where_needed_is_zero(framework: Framework) -> None:
    op = op_custom_gradient(
        lambda x, y: (x * y, lambda upstream, needs_input_grad: (None, 7.0 * upstream[0]))
    )
    framework.check_at(op, X, Y, upstream=U, gradients=(np.zeros(2), 7.0 * U[0]))


@case()
def needed_of_wrong_shape(framework: Framework) -> None:
    op = op_custom_gradient(
        lambda x, y: (x * y, lambda upstream, needs_input_grad: (upstream[0], 7.0 * upstream[0])),
        name="op",
    )
    x, y, upstream = framework.tensors((X, Y, U))
    _, pullback = op_vjp(lambda x: op(x, y), x)
    sentence = "op: the gradient of x must have its shape f32[2], got f32[]; "
    raised(CustomGradientValueError, pullback, upstream, starts=sentence)


@case()
def integers_need_nothing(framework: Framework) -> None:
    """A gradient for a tensor without one is dropped."""
    op = op_custom_gradient(
        lambda x, n: (x * 3.0, lambda upstream, needs_input_grad: (7.0 * upstream, upstream[0]))
    )
    n = framework.tensor([1, 2, 3], "int32")
    framework.check_at(lambda x: op(x, n), X, upstream=U, gradients=(7.0 * U,))


# --- Further orders -------------------------------------------------------------------------------


RESIDUALS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "an argument": lambda x, y, output: y * y,
    "an output": lambda x, y, output: output / x,
}


def _square(of_x: Callable[..., Tensor], takes_needs_input_grad: bool) -> Callable[..., Tensor]:
    """x * y**2 with the right rule, which skips unneeded gradients, or without needs_input_grad."""

    def with_flags(x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
        output = x * y * y
        made = 2.0 * y if needs_input_grad[1] else None  # a second order runs f again for it

        def grad(upstream: Tensor, needs_input_grad: Any) -> Any:
            needs_x, needs_y = needs_input_grad
            return upstream * of_x(
                x, y, output
            ) if needs_x else None, upstream * made * x if needs_y else None

        return output, grad

    def plain(x: Tensor, y: Tensor) -> Any:
        output, made = x * y * y, 2.0 * y
        return output, lambda upstream: [upstream * of_x(x, y, output), upstream * made * x]

    return op_custom_gradient(with_flags if takes_needs_input_grad else plain, name="op")


@case(of_x=RESIDUALS, takes_needs_input_grad={"told": True, "not told": False})
def needed_in_every_order(
    framework: Framework, of_x: Callable[..., Tensor], takes_needs_input_grad: bool
) -> None:
    """Each order needs other arguments; the numbers are an op's that skips nothing."""
    x, y, one = framework.tensors((2.0, 3.0, 1.0))
    op = _square(of_x, takes_needs_input_grad)

    def gradient(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda at: op_vjp(fn, at)[1](one)[0]

    of_x_then_y = gradient(lambda y: gradient(lambda x: op(x, y) ** 2)(x))
    of_y_then_x = gradient(lambda x: gradient(lambda y: op(x, y) ** 2)(y))
    of_y_twice = gradient(gradient(lambda y: op(x, y) ** 2))
    framework.check_equal(of_x_then_y(y), 8.0 * 2.0 * 27.0)
    framework.check_equal(of_y_then_x(x), 8.0 * 2.0 * 27.0)
    framework.check_equal(of_y_twice(y), 12.0 * 4.0 * 9.0)


@case()
def needed_in_forward_mode(framework: Framework) -> None:
    """Forward mode transposes the rule, with True for every argument that has a tangent."""

    def f(x: Tensor, y: Tensor, *, needs_input_grad: Any = None) -> Any:
        assert needs_input_grad[0]

        def grad(upstream: Tensor, needs_input_grad: Any) -> Any:
            assert needs_input_grad[0]
            return 7.0 * y * upstream, 11.0 * x * upstream if needs_input_grad[1] else None

        return x * y, grad

    op, y = op_custom_gradient(f, forward_mode=True), framework.tensor([3.0, 5.0])
    output_tangent = tangent(
        framework, lambda x: op(x, y), framework.tensor(X), framework.tensor(U)
    )
    framework.check_equal(output_tangent, 7.0 * np.array([3.0, 5.0]) * U)


@case()
def needed_once(framework: Framework) -> None:
    op = op_custom_gradient(
        lambda x, y: (x * y, lambda upstream, needs_input_grad: (7.0 * y * upstream, 11.0 * upstream * x)),
        once_differentiable=True,
    )  # fmt: skip
    y = framework.tensor([3.0, 5.0])
    framework.check_at(lambda x: op(x, y), X, upstream=U, gradients=(np.array([42.0, -105.0]),))


# --- Errors ---------------------------------------------------------------------------------------

NO_FORMS: dict[str, Rule] = {
    "by position alone": lambda upstream, needs_input_grad, /: upstream,
    "before upstream": lambda needs_input_grad, upstream: upstream,
    "misspelt": lambda upstream, *, need_input_grad: upstream,
    "misspelt by position": lambda upstream, needs_input_grads: upstream,
}


@case(grad=NO_FORMS)
def needed_in_no_form(framework: Framework, grad: Rule) -> None:
    op = op_custom_gradient(lambda x: (x * x, grad), name="op")
    error = raised(CustomGradientTypeError, op, framework.tensor(2.0))
    assert "each with or without variables and needs_input_grad last, got <lambda>(" in str(
        error
    ), error


@case()
def needed_from_the_caller(framework: Framework) -> None:
    """The caller cannot pass the flags."""

    @op_custom_gradient
    def op(x: Tensor, *, needs_input_grad: Any = None, **options: Any) -> Any:
        return x * 3.0, lambda upstream: upstream

    error = raised(
        CustomGradientTypeError, lambda: op(framework.tensor(2.0), needs_input_grad=(True,))
    )
    assert (
        str(error)
        == "op: needs_input_grad must be left to cgshim, got one in the call; leave it out"
    )
    error = raised(CustomGradientTypeError, op_custom_gradient, lambda x, needs_input_grad: x)
    assert str(error) == (
        "<lambda>: needs_input_grad must be keyword-only in f, got a positional parameter; "
        "write f(..., *, needs_input_grad), or give the argument another name"
    )
