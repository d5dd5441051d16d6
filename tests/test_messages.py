"""The whole text of every message: the same on every backend, and written as a product."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import cgshim
from cgshim import CustomGradientTypeError, CustomGradientValueError, ops
from cgshim._errors import describe
from cgshim.testing.conformance import Framework
from cgshim.testing.conformance._framework import tangent

FORMS = (
    "grad(upstream), grad(*args, upstream) or grad(d1, d2, ...), "
    "each with or without variables and needs_input_grad last"
)
PAIR = (
    "return the output and a function that turns upstream gradients into gradients of the arguments"
)
IN_ORDER = "return them in order, each None, a tensor, or structured as its argument"
BROADCAST = "sum over what was broadcast (op_sum_to_shape), or broadcast it in the rule"
ONE_A_VARIABLE = "return (gradients, [one per variable])"


class Point(NamedTuple):
    first: Any
    second: Any


@pytest.fixture
def framework(backend: str) -> Framework:
    return Framework(backend)


def raises(error: type[Exception], text: str, fn: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error) as caught:
        fn(*args)
    assert type(caught.value) is error
    assert str(caught.value) == text


# --- At decoration and at the call ----------------------------------------------------------------


NO_FUNCTIONS = {
    "int": 3,
    "property": property(lambda self: 3),
    "cached_property": functools.cached_property(lambda self: 3),
    "singledispatchmethod": functools.singledispatchmethod(
        lambda self, x: (x, lambda upstream: upstream)
    ),
}


@pytest.mark.parametrize(("kind", "f"), NO_FUNCTIONS.items(), ids=NO_FUNCTIONS)
def test_what_is_decorated_must_be_callable(kind: str, f: Any) -> None:
    raises(
        CustomGradientTypeError, f"op_custom_gradient: f must be callable, got {kind}; decorate a function",
        cgshim.op_custom_gradient, f,
    )  # fmt: skip


def _generates(x: Any, y: Any) -> Any:
    yield x, lambda upstream: upstream


async def _promises(x: Any, y: Any) -> Any:
    return x, lambda upstream: upstream


def _closed(coroutine: Any) -> Any:
    """Close a coroutine that is not awaited: Python would warn of it."""
    coroutine.close()
    return coroutine


AT_THE_CALL: dict[str, tuple[Callable[..., Any], str]] = {
    "no pair": (
        lambda x, y: x,
        f"<lambda> must return a pair (output, grad_fn), got f32[2]; {PAIR}",
    ),
    "nothing": (
        lambda x, y: None,
        f"<lambda> must return a pair (output, grad_fn), got None; {PAIR}",
    ),
    "no rule": (
        lambda x, y: (x, None),
        f"<lambda> must return a pair (output, grad_fn), got (f32[2], None); {PAIR}",
    ),
    "no callable": (
        lambda x, y: (x, 3),
        f"<lambda> must return a pair (output, grad_fn), got (f32[2], int); {PAIR}",
    ),
    "a list": (
        lambda x, y: [x, lambda u: u],
        f"<lambda> must return a pair (output, grad_fn), got a list of 2; {PAIR}",
    ),
    "three": (
        lambda x, y: (x, y, lambda u: u),
        f"<lambda> must return a pair (output, grad_fn), got a tuple of 3; {PAIR}",
    ),
    "an op": (
        cgshim.op_custom_gradient(lambda x, y: (x, lambda u: u)),
        f"<lambda> must return a pair (output, grad_fn), got f32[2]; {PAIR}",
    ),
    "a generator": (
        _generates,
        f"_generates must return a pair (output, grad_fn), got generator; {PAIR}",
    ),
    "a coroutine": (
        lambda x, y: _closed(_promises(x, y)),
        f"<lambda> must return a pair (output, grad_fn), got coroutine; {PAIR}",
    ),
    "no tensor": (
        lambda x, y: (1.0, lambda u: u),
        "the output of f must hold a tensor when an argument does, got float; return a tensor of {backend}",
    ),
    "an empty output": (
        lambda x, y: ([], lambda u: u),
        "the output of f must hold a tensor when an argument does, got a list of 0; return a tensor of {backend}",
    ),
    "no parameter": (
        lambda x, y: (x, lambda: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>() for 2 arguments and 1 tensor output; "
        "write it in one of these forms",
    ),
    "two upstreams for one output": (
        lambda x, y: (x, lambda d1, d2: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(d1, d2) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
    "three upstreams for two outputs": (
        lambda x, y: ((x, {"y": y, "static": "s"}), lambda d1, d2, d3: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(d1, d2, d3) for 2 arguments and "
        "2 tensor outputs; write it in one of these forms",
    ),
    "one argument for two": (
        lambda x, y: (x, lambda x, upstream: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(x, upstream) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
    "variables before the upstream": (
        lambda x, y: (x, lambda variables, u: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(variables, u) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
    "variables=None before the upstream": (
        lambda x, y: (x, lambda variables=None, upstream=1.0: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(variables=None, upstream=1.0) for "
        "2 arguments and 1 tensor output; write it in one of these forms",
    ),
    "variables before the arguments": (
        lambda x, y: (x, lambda variables, x, y, upstream: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(variables, x, y, upstream) for "
        "2 arguments and 1 tensor output; write it in one of these forms",
    ),
    "variables among the upstreams": (
        lambda x, y: ((x, y), lambda d1, variables, d2: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(d1, variables, d2) for 2 arguments and "
        "2 tensor outputs; write it in one of these forms",
    ),
    "variables by position alone": (
        lambda x, y: (x, lambda u, variables, /: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(u, variables, /) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
    "variables alone": (
        lambda x, y: (x, lambda variables: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(variables) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
    "a keyword of its own": (
        lambda x, y: (x, lambda upstream, *, scale: None),
        f"grad_fn must take its upstream gradients as {FORMS}, got <lambda>(upstream, *, scale) for 2 arguments and "
        "1 tensor output; write it in one of these forms",
    ),
}
"""f, and what is said of it, after the name of the op."""


@pytest.mark.parametrize(("f", "text"), AT_THE_CALL.values(), ids=AT_THE_CALL.keys())
@pytest.mark.parametrize("differentiated", [False, True], ids=["plain", "differentiated"])
def test_at_the_call(
    framework: Framework, f: Callable[..., Any], text: str, differentiated: bool
) -> None:
    op = cgshim.op_custom_gradient(f, name="op")
    args = framework.tensor([1.0, 2.0]), framework.tensor(5.0)
    call = (lambda *args: cgshim.op_vjp(op, *args)) if differentiated else op
    raises(CustomGradientTypeError, f"op: {text.replace('{backend}', framework.name)}", call, *args)


BINDING: dict[str, tuple[Callable[..., Any], str]] = {
    "too few": (lambda op, x: op(), "op: missing a required argument: 'x'"),
    "too many": (lambda op, x: op(x, x), "op: too many positional arguments"),
    "unknown": (lambda op, x: op(x, scale=x), "op: got an unexpected keyword argument 'scale'"),
    "twice": (lambda op, x: op(x, x=x), "op: multiple values for argument 'x'"),
}


@pytest.mark.parametrize(("call", "text"), BINDING.values(), ids=BINDING.keys())
def test_binding(framework: Framework, call: Callable[..., Any], text: str) -> None:
    op = cgshim.op_custom_gradient(lambda x: (x, lambda u: u), name="op")
    raises(CustomGradientTypeError, text, call, op, framework.tensor([1.0, 2.0]))


# --- In the backward pass -------------------------------------------------------------------------

IN_BACKWARD: dict[str, tuple[Callable[..., Any], str]] = {
    "too many": (
        lambda u: (u,) * 4,
        "one gradient for each argument (x, tree), got (f32[2], f32[2], f32[2], f32[2])",
    ),
    "too few": (lambda u: (u,), "one gradient for each argument (x, tree), got (f32[2],)"),
    "bare": (lambda u: u, "one gradient for each argument (x, tree), got f32[2]"),
    "a dict": (lambda u: {"x": u}, "one gradient for each argument (x, tree), got {'x': f32[2]}"),
    "another structure": (
        lambda u: (u, [u]),
        "one gradient for each argument (x, tree), got (f32[2], [f32[2]])",
    ),
    "another key": (
        lambda u: (u, {"v": u, "p": None}),
        "one gradient for each argument (x, tree), got (f32[2], {'v': f32[2], 'p': None})",
    ),
    "a long one": (
        lambda u: (u, [u] * 50),
        "one gradient for each argument (x, tree), got (f32[2], a list of 50)",
    ),
    "nothing at all": (lambda u: [], "one gradient for each argument (x, tree), got []"),
}
"""A rule for x of shape (2,) and a tree, and what is said of it."""


def _run_backward(framework: Framework, rule: Callable[..., Any]) -> None:
    op = cgshim.op_custom_gradient(lambda x, tree: (x * 1.0, rule), name="op")
    tree = {"w": [framework.tensor([[1.0, 2.0, 3.0]])], "p": Point("static", framework.tensor(1.0))}
    _, pullback = cgshim.op_vjp(op, framework.tensor([1.0, 2.0]), tree)
    pullback(framework.tensor([2.0, -3.0]))


@pytest.mark.parametrize(("rule", "text"), IN_BACKWARD.values(), ids=IN_BACKWARD.keys())
def test_count_and_structure(framework: Framework, rule: Callable[..., Any], text: str) -> None:
    raises(
        CustomGradientValueError,
        f"op: grad_fn must return {text}; {IN_ORDER}",
        _run_backward,
        framework,
        rule,
    )


SHAPES: dict[str, tuple[Callable[..., Any], str]] = {
    "a scalar": (lambda u: (u[0], None), "x must have its shape f32[2], got f32[]"),
    "a row": (lambda u: (u[None], None), "x must have its shape f32[2], got f32[1,2]"),
    "one that would broadcast": (
        lambda u: (u[:1], None),
        "x must have its shape f32[2], got f32[1]",
    ),
    "in a dict and a list": (
        lambda u: (u, {"w": [u], "p": None}),
        "tree['w'][0] must have its shape f32[1,3], got f32[2]",
    ),
    "in a namedtuple": (
        lambda u: (u, {"w": None, "p": Point(None, u)}),
        "tree['p'].second must have its shape f32[], got f32[2]",
    ),
    "in a flat list": (
        lambda u: [u, u, None],
        "tree['p'].second must have its shape f32[], got f32[2]",
    ),
}


@pytest.mark.parametrize(("rule", "text"), SHAPES.values(), ids=SHAPES.keys())
def test_shape(framework: Framework, rule: Callable[..., Any], text: str) -> None:
    raises(
        CustomGradientValueError,
        f"op: the gradient of {text}; {BROADCAST}",
        _run_backward,
        framework,
        rule,
    )


@pytest.mark.parametrize("number", [0, 3.0])
def test_a_number_for_a_gradient(framework: Framework, number: float) -> None:
    raises(
        CustomGradientValueError,
        f"op: the gradient of x must have its shape f32[2], got {number}; "
        "return None for a zero gradient, or a tensor of this shape",
        _run_backward, framework, lambda u: (number, None),
    )  # fmt: skip


def test_a_wrong_key_in_a_dict(framework: Framework) -> None:
    op = cgshim.op_custom_gradient(
        lambda p: (p["a"] * p["b"], lambda u: {"a": u, "c": u}), name="op"
    )
    x = framework.tensor([1.0, 2.0])
    _, pullback = cgshim.op_vjp(op, {"a": x, "b": x})
    raises(
        CustomGradientValueError,
        "op: grad_fn must return one gradient for each argument (p), "
        f"got {{'a': f32[2], 'c': f32[2]}}; {IN_ORDER} (p['a'], p['b'])",
        pullback, x,
    )  # fmt: skip


def test_one_upstream_for_two_outputs(framework: Framework) -> None:
    op = cgshim.op_custom_gradient(lambda x: ((x, x + x), lambda u: (x * u,)), name="two")
    x = framework.tensor([1.0, 2.0])
    _, pullback = cgshim.op_vjp(op, x)
    with pytest.raises((CustomGradientValueError, TypeError)) as caught:
        pullback((x, x))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    hint = (
        "two has 2 outputs: upstream is (f32[2], f32[2]); write grad(d1, d2) for one upstream each"
    )
    assert hint in told or not hasattr(caught.value, "add_note")


def test_numpy_data_beside_captured_weights(framework: Framework) -> None:
    w, data = framework.tensor([3.0, 4.0]), np.array([1.0, 2.0], "float32")

    def loss(w: Any, **declared: Any) -> Any:
        def scaled(x: Any) -> Any:
            gradient = lambda u, variables: (u * w, [7.0 * u * x])
            return cgshim.ops.sum(x * w), gradient

        return cgshim.op_custom_gradient(scaled, **declared)(data)

    found = cgshim.op_grad(lambda w: loss(w, variables=[w]))(w)
    framework.check_equal(found, 7.0 * data)
    if framework.name != "numpy":
        with pytest.raises((CustomGradientTypeError, TypeError)):
            cgshim.op_grad(loss)(w)


def test_shape_of_a_star_argument(framework: Framework) -> None:
    op = cgshim.op_custom_gradient(lambda x, *rest: (x * 1.0, lambda u: (u, u, u[0])), name="op")
    _, pullback = cgshim.op_vjp(op, *(framework.tensor([1.0, 2.0]) for _ in range(3)))
    text = f"op: the gradient of rest[1] must have its shape f32[2], got f32[]; {BROADCAST}"
    raises(CustomGradientValueError, text, pullback, framework.tensor([2.0, -3.0]))


@pytest.mark.parametrize(
    ("gradient", "what"),
    [("text", "str"), (object(), "object"), (len, "builtin_function_or_method")],
)
def test_gradient_that_is_no_tensor(framework: Framework, gradient: object, what: str) -> None:
    text = f"op: the gradient of x must be a tensor or None, got {what}; return None where there is no gradient"
    raises(CustomGradientTypeError, text, _run_backward, framework, lambda u: (gradient, None))


def test_complex_gradient_of_a_real_argument(framework: Framework) -> None:
    gradient = framework.tensor([1.0j, 2.0], "complex64")
    text = "op: the gradient of x must be real as it is (f32[2]), got c64[2]; take the real part in the rule"
    raises(CustomGradientValueError, text, _run_backward, framework, lambda u: (gradient, None))


def test_mask_for_a_gradient(framework: Framework) -> None:
    gradient = framework.tensor([1.0, 0.0]) > 0
    text = (
        "op: the gradient of x must hold numbers (f32[2]), got bool[2]; write ops.where(mask, upstream, 0.0): "
        "upstream * mask is one in TensorFlow"
    )
    raises(CustomGradientValueError, text, _run_backward, framework, lambda u: (gradient, None))


# --- Tensors of two frameworks --------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every two frameworks of the run, and NumPy, which is always here, where it can be the first
    of two.
    """
    if "other" in metafunc.fixturenames:
        names = set(metafunc.config.option.backends)
        first = (
            names - {"numpy"}
            if "other_tensors" in metafunc.function.__name__
            else names | {"numpy"}
        )
        pairs = sorted((name, other) for name in first for other in names - {name, "numpy"})
        alone = pytest.param(
            "numpy", "numpy", marks=pytest.mark.skip(reason="there is one framework in this run")
        )
        metafunc.parametrize(("name", "other"), pairs or [alone])
    if "framework_other_than_numpys" in metafunc.fixturenames:
        others = [Framework(name) for name in metafunc.config.option.backends if name != "numpy"]
        none = pytest.param(
            None, marks=pytest.mark.skip(reason="NumPy is the only framework in this run")
        )
        metafunc.parametrize("framework_other_than_numpys", others or [none])


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble"])
def test_long_doubles_beside_other_tensors(
    add: Any, framework_other_than_numpys: Framework, dtype: str
) -> None:
    framework, array = framework_other_than_numpys, np.array([1.0, 2.0], dtype)
    text = f"op: only NumPy has long double, got {describe(array)}; cast it to a dtype of {framework.name}"
    raises(CustomGradientTypeError, text, add, framework.tensor([1.0, 2.0]), array)


@pytest.fixture
def add() -> Any:
    return cgshim.op_custom_gradient(lambda x, y: (x + y, lambda u: (u, u)), name="op")


TWO = "tensors of one call belong to one framework"


def test_numpy_array_beside_other_tensors(add: Any, backend: str) -> None:
    """NumPy's arrays are everybody's constants: beside them no tensor is another framework's."""
    framework = Framework(backend)
    x, y = np.array([1.0, 2.0], "float32"), framework.tensor([3.0, 4.0])
    framework.check_equal([add(x, y), add(y, x)], [np.array([4.0, 6.0])] * 2)


def test_tensor_beside_other_tensors(add: Any, name: str, other: str) -> None:
    text = (f"op: {TWO} (other tensors of this call are {name}'s), got f32[2] of {other}; "
            f"convert it to {name} or choose another backend")  # fmt: skip
    x, y = Framework(name).tensor([1.0, 2.0]), Framework(other).tensor([3.0, 4.0])
    raises(cgshim.BackendError, text, add, x, y)
    raises(cgshim.BackendError, text, add, [x, None], {"y": y})


def _by_use_backend(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def within(*args: Any) -> Any:
        with cgshim.use_backend(name):
            return call(*args)

    return within


def test_tensor_of_another_backend_than_the_chosen(add: Any, name: str, other: str) -> None:
    text = (f"op: {TWO} (use_backend chooses {name}), got f32[2] of {other}; "
            f"convert it to {name} or choose another backend")  # fmt: skip
    x = Framework(other).tensor([1.0, 2.0])
    raises(cgshim.BackendError, text, _by_use_backend(name, add), x, 3.0)


def test_gradient_of_another_backend(name: str, other: str) -> None:
    """A rule that answers with another framework's tensor is told so, by name."""
    stray = Framework(other).tensor([3.0, 4.0])
    op = cgshim.op_custom_gradient(lambda x: (x * 1.0, lambda u: stray), name="op")
    text = (f"op: {TWO} (other tensors of this call are {name}'s), got f32[2] of {other}; "
            f"convert it to {name} or choose another backend")  # fmt: skip
    _, pullback = cgshim.op_vjp(op, Framework(name).tensor([1.0, 2.0]))
    raises(cgshim.BackendError, text, pullback, Framework(name).tensor([2.0, -3.0]))


def test_output_of_another_backend(name: str, other: str) -> None:
    """NumPy's arrays are everybody's constants: not where NumPy was chosen, or where they are
    differentiated.
    """
    x, stray = np.array([1.0, 2.0], "float32"), Framework(other).tensor([3.0, 4.0])
    op = cgshim.op_custom_gradient(lambda x: ([stray], lambda u: u[0]), name="op")
    text = (f"op: {TWO} (use_backend chooses {name}), got f32[2] of {other}; "
            f"convert it to {name} or choose another backend")  # fmt: skip
    raises(cgshim.BackendError, text, _by_use_backend(name, op), x)
    text = (f"op: {TWO} (other tensors of this call are {name}'s), got f32[2] of {other}; "
            f"convert it to {name} or choose another backend")  # fmt: skip
    with pytest.raises(cgshim.BackendError) as caught:
        cgshim.op_vjp(op, Framework(name).tensor([1.0, 2.0]))
    assert str(caught.value) == text


# --- Variables ------------------------------------------------------------------------------------


def _run_with_state(framework: Framework, rule: Callable[..., Any]) -> None:
    x = framework.tensor([1.0, 2.0])
    op_of = lambda w: cgshim.op_custom_gradient(lambda x: (x * w, rule), name="op")
    _, pullback = framework.differentiate_state(lambda w: op_of(w)(x), framework.tensor(5.0))
    pullback(framework.tensor([2.0, -3.0]))


TELL = "write grad_fn(..., variables=None) and return (gradients, [one per variable]), or pass the state as an argument"

STATE: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "not taken": (
        lambda upstream: upstream,
        CustomGradientTypeError,
        f"grad_fn must take variables when f reads trainable state, got <lambda>(upstream) and f32[]; {TELL}",
    ),
    "no pair": (
        lambda upstream, variables: upstream,
        CustomGradientValueError,
        f"grad_fn with variables must return a pair (gradients, variable_gradients), got f32[2]; {ONE_A_VARIABLE}",
    ),
    "too many": (
        lambda upstream, variables: (upstream, [upstream, upstream]),
        CustomGradientValueError,
        f"grad_fn must return one gradient for each of 1 variable, got a list of 2; {ONE_A_VARIABLE}",
    ),
    "bare": (
        lambda upstream, variables: (upstream, upstream[0]),
        CustomGradientValueError,
        f"grad_fn must return one gradient for each of 1 variable, got f32[]; {ONE_A_VARIABLE}",
    ),
    "another shape": (
        lambda upstream, variables: (upstream, [upstream]),
        CustomGradientValueError,
        f"the gradient of variables[0] must have its shape f32[], got f32[2]; {BROADCAST}",
    ),
}


@pytest.mark.parametrize(("rule", "error", "text"), STATE.values(), ids=STATE.keys())
def test_variables(
    framework: Framework, rule: Callable[..., Any], error: type[Exception], text: str
) -> None:
    raises(error, f"op: {text}", _run_with_state, framework, rule)


def test_captured_tensor_that_is_differentiated(framework: Framework) -> None:
    """To some frameworks what is being differentiated is state, to others only their own objects
    are.
    """
    rule = lambda upstream: upstream
    op_of = lambda w: cgshim.op_custom_gradient(lambda x: (x * w, rule), name="op")
    with pytest.raises(CustomGradientTypeError) as caught:
        cgshim.op_vjp(lambda w: op_of(w)(framework.tensor([1.0, 2.0])), framework.tensor(5.0))
    assert str(caught.value) in (
        f"op: {STATE['not taken'][2]}",
        "op: f must be given every tensor that is differentiated, got a captured f32[]; pass it as an argument",
    )


# --- Second orders, forward mode and ops in rules -------------------------------------------------


class Refused(NamedTuple):
    """An op, what is done to it, and the whole of what is said: `*` stands for the framework's own
    name of it.
    """

    f: Callable[..., Any]
    options: dict[str, Any]
    ask: Callable[[Framework, Any], Any]
    text: str


def second(framework: Framework, op: Any) -> Any:
    return cgshim.op_grad(cgshim.op_grad(op))(framework.tensor(2.0))


def forward(framework: Framework, op: Any) -> Any:
    return tangent(framework, op, framework.tensor(2.0), framework.tensor(3.0))


def forward_over_reverse(framework: Framework, op: Any) -> Any:
    return forward(framework, cgshim.op_grad(op))


def made_of_values(x: Any) -> Any:
    square = cgshim.op_convert_to_tensor(cgshim.op_convert_to_numpy(x) ** 2)
    return square * x, lambda upstream: upstream * 7.0 * square


ONCE = ("a rule that is once_differentiable gives a gradient without derivatives, got *; "
        "leave out once_differentiable=True if the rule can be differentiated")  # fmt: skip
LINEAR = "forward mode needs a rule that is linear in upstream, got *; "

REFUSED: dict[str, Refused] = {
    "a second order of what has one order": Refused(
        lambda x: (x * x, lambda upstream: 7.0 * upstream * x), {"once_differentiable": True}, second, ONCE
    ),
    "forward over reverse of what has one order": Refused(
        lambda x: (x * x, lambda upstream: 7.0 * upstream * x), {"once_differentiable": True, "forward_mode": True},
        forward_over_reverse, ONCE,
    ),
    "forward mode that is not promised": Refused(
        lambda x: (x * x, lambda upstream: 7.0 * ops.sin(upstream)), {}, forward,
        LINEAR + "if it is, say so with op_custom_gradient(forward_mode=True)",
    ),
    "an affine rule": Refused(
        lambda x: (x * x, lambda upstream: upstream + 1.0), {"forward_mode": True}, forward,
        LINEAR + "write it in linear operations, or use reverse mode",
    ),
    "a rule that is not linear": Refused(
        lambda x: (x * x, lambda upstream: upstream * upstream), {"forward_mode": True}, forward,
        LINEAR + "write it in linear operations, or use reverse mode",
    ),
    "a residual made of values": Refused(
        made_of_values, {}, second,
        "a second order needs every tensor that grad_fn reads as a function of the arguments, got *; "
        "let grad_fn compute it, or let f return it as an output",
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED.keys())
def test_refused_transformation(framework: Framework, refused: Refused) -> None:
    op = cgshim.op_custom_gradient(refused.f, name="op", **refused.options)
    with pytest.raises(cgshim.TransformationError) as caught:
        refused.ask(framework, op)
    assert re.fullmatch(re.escape(f"op: {refused.text}").replace(r"\*", "[^;]+"), str(caught.value))


def test_tensor_in_a_static_leaf(framework: Framework) -> None:
    f = lambda x: ((x * x, types.SimpleNamespace(held=x * 2.0)), lambda upstream: upstream[0])
    text = ("op: the output of f must hold its tensors in containers that the backend knows, "
            "got f32[2] in SimpleNamespace; return the tensor itself")  # fmt: skip
    op = cgshim.op_custom_gradient(f, name="op")
    raises(CustomGradientTypeError, text, op, framework.tensor([1.0, 2.0]))


UNBOUND = {
    "classmethod": classmethod(lambda cls, x: (x, lambda upstream: upstream)),
    "partialmethod": functools.partialmethod(lambda self, x: (x, lambda upstream: upstream)),
}


@pytest.mark.parametrize(("kind", "method"), UNBOUND.items(), ids=UNBOUND)
def test_method_that_is_not_bound(framework: Framework, kind: str, method: Any) -> None:
    op = cgshim.op_custom_gradient(method, name="op")
    text = (f"op: a {kind} must be bound when it is called, got one that is not; "
            "call it as an attribute of its class")  # fmt: skip
    raises(CustomGradientTypeError, text, op, framework.tensor([1.0, 2.0]))


# --- op_vjp and op_grad ---------------------------------------------------------------------------


def square(x: Any) -> Any:
    return x * x


UPSTREAMS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a pair": (
        lambda u: (u, u),
        CustomGradientTypeError,
        "the upstream gradients must be structured as the output, got (f32[2], f32[2]); write them as f32[2]",
    ),
    "another shape": (
        lambda u: u[0],
        CustomGradientValueError,
        f"the gradient of the output must have its shape f32[2], got f32[]; {BROADCAST}",
    ),
    "text": (
        lambda u: "text",
        CustomGradientTypeError,
        "the gradient of the output must be a tensor or None, got str; return None where there is no gradient",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), UPSTREAMS.values(), ids=UPSTREAMS.keys())
def test_upstream_of_a_pullback(
    framework: Framework, change: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    _, pullback = cgshim.op_vjp(square, framework.tensor([1.0, 2.0]))
    raises(error, f"op_vjp(square): {text}", pullback, change(framework.tensor([2.0, -3.0])))


def test_gradient_of_a_vector(framework: Framework) -> None:
    text = "op_grad(square): the function must return one real scalar, got f32[2]; use op_vjp for other outputs"
    raises(CustomGradientTypeError, text, cgshim.op_grad(square), framework.tensor([1.0, 2.0]))


def test_gradient_by_an_integer(framework: Framework) -> None:
    text = ("op_grad(square): argument 0 must hold only float or complex tensors, got i32[]; "
            "convert it, or leave it out of argnums")  # fmt: skip
    raises(CustomGradientTypeError, text, cgshim.op_grad(square), framework.tensor(2, "int32"))


# --- Wrong calls ----------------------------------------------------------------------------------

INSTALLED = "cgshim: a backend is named by its framework's import root, got "

WRONG_CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a size for a shape": (
        lambda: cgshim.Spec((2), "float32"),  # type: ignore[arg-type]
        CustomGradientTypeError,
        "Spec: shape must be a tuple of sizes, got 2; write (2,) or ()",
    ),
    "an unknown dtype": (
        lambda: cgshim.Spec((2,), "flot32"),
        CustomGradientTypeError,
        "Spec: dtype must be a framework's, or its name, got 'flot32'; write \"float32\", or torch.float32",
    ),
    "a negative length": (
        lambda: ops.scan(lambda carry, x: (carry, carry), np.float32(1.0), length=-1),
        CustomGradientValueError,
        "op_scan: xs and length must tell one number of steps, at least 1, got [-1]; "
        "give tensors with first axes of one size, or a length",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    raises(error, text, call)


def test_a_backend_is_named_by_a_string() -> None:
    names: Any = ["numpy"]
    for choose in (cgshim.set_backend, lambda name: cgshim.use_backend(name).__enter__()):
        with pytest.raises(
            cgshim.BackendError, match=re.escape(f"{INSTALLED}['numpy']; installed: ")
        ):
            choose(names)


def test_an_unknown_rank_is_three_dots() -> None:
    assert (
        describe(types.SimpleNamespace(shape=types.SimpleNamespace(rank=None), dtype="float32"))
        == "f32[...]"
    )
