"""Rules that keep residuals in many places: each derivative is right, or an error.

The rules have 5 for 1, so that a number that autodiff found by itself does not pass.
"""

import collections
import contextlib
import dataclasses
import functools
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cgshim import (
    CustomGradientError,
    TransformationError,
    op_convert_to_tensor,
    op_custom_gradient,
    op_vjp,
)

X = torch.tensor([1.0, 2.0], dtype=torch.float64)
WEIGHTS = torch.tensor([3.0, -2.0], dtype=torch.float64)


def leaf(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# --- Places: f(x) = 2 x, whose rule keeps sin(x), and is 5 u x sin(x) -----------------------------


def expected(order, x=X, weights=WEIGHTS):
    """The derivatives of weights times f, each of the sum of the one before."""
    sin, cos = x.sin(), x.cos()
    return 5 * weights * {1: x * sin, 2: sin + x * cos, 3: 2 * cos - x * sin}[order]


class Box:
    """An object with attributes."""

    def __init__(self, kept=None):
        self.kept = kept


@dataclasses.dataclass
class Record:
    kept: torch.Tensor


class Partial:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __call__(self, upstream):
        return self.function(*self.args, upstream)


def in_a_variable(x):
    kept = x.sin()
    return 2 * x, lambda u: 5 * u * kept * x


def in_a_list(x):
    kept = [x.sin()]
    return 2 * x, lambda u: 5 * u * kept[0] * x


def in_a_dict(x):
    kept = {"sine": x.sin()}
    return 2 * x, lambda u: 5 * u * kept["sine"] * x


def in_a_tuple(x):
    kept = (x.sin(), "static")
    return 2 * x, lambda u: 5 * u * kept[0] * x


def in_a_namespace(x):
    ctx = types.SimpleNamespace(kept=x.sin())
    return 2 * x, lambda u: 5 * u * ctx.kept * x


def in_a_nested_function(x):
    kept = x.sin()

    def scaled(u):
        return 5 * u * kept

    return 2 * x, lambda u: scaled(u) * x


def in_a_default_value(x):
    def rule(u, kept=x.sin()):  # noqa: B008
        return 5 * u * kept * x

    return 2 * x, rule


def in_a_partial(x):
    return 2 * x, functools.partial(lambda kept, x, u: 5 * u * kept * x, x.sin(), x)


def in_a_partial_of_c(x):
    return 2 * x, functools.partial(torch.mul, 5 * x.sin() * x)


def in_an_object_that_is_called(x):
    return 2 * x, Partial(lambda kept, x, u: 5 * u * kept * x, x.sin(), x)


def in_a_dataclass(x):
    record = Record(x.sin())
    return 2 * x, lambda u: 5 * u * record.kept * x


def in_an_object(x):
    box = Box([x.sin()])
    return 2 * x, lambda u: 5 * u * box.kept[0] * x


def in_an_attribute_of_the_rule(x):
    def rule(u):
        return 5 * u * rule.kept * x

    rule.kept = x.sin()
    return 2 * x, rule


def in_a_deque(x):
    kept = collections.deque([x.sin()])
    return 2 * x, lambda u: 5 * u * kept[0] * x


def in_a_set(x):
    kept = {x.sin()}
    return 2 * x, lambda u: 5 * u * kept.pop() * x


def in_an_inner_vjp(x):
    _, pullback = torch.func.vjp(lambda x: -x.cos(), x)
    return 2 * x, lambda u: pullback(5 * u * x)[0]


def in_an_inner_vjp_of_the_output(x):
    y, pullback = torch.func.vjp(lambda x: 2 * x, x)
    return y, lambda u: pullback(2.5 * u * x.sin() * x)[0]


def in_an_inner_vjp_of_an_op(x):
    twice = op_custom_gradient(lambda x: (2 * x, lambda u: 2 * u), forward_mode=True)
    y, pullback = torch.func.vjp(twice, x)
    return y, lambda u: pullback(2.5 * u * x.sin() * x)[0]


def in_an_inner_tape(x):
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        y = -at.cos()
    return 2 * x, lambda u: torch.autograd.grad(y, at, 5 * u * x, create_graph=True)[0]


class Times(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a, b):
        return a * b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, u):
        a, b = ctx.saved_tensors
        return u * b, u * a


def for_a_function(x):
    kept = x.sin()
    return 2 * x, lambda u: 5 * Times.apply(u, kept) * x


inner_sine = op_custom_gradient(lambda x: (x.sin(), lambda u: u * x.cos()))


def for_an_op_in_f(x):
    kept = inner_sine(x)
    return 2 * x, lambda u: 5 * u * kept * x


def for_an_op_in_the_rule(x):
    return 2 * x, lambda u: 5 * u * inner_sine(x) * x


def without_gradients(x):
    with torch.no_grad():
        kept = x.sin()
    return 2 * x, lambda u: 5 * u * kept * x


def through_numpy(x):
    kept = torch.from_numpy(np.sin(x.detach().numpy()))
    return 2 * x, lambda u: 5 * u * kept * x


def written_into(x):
    kept = torch.empty_like(x)
    torch.sin(x, out=kept)
    return 2 * x, lambda u: 5 * u * kept * x


PLACES = {
    f.__name__: f
    for f in (
        in_a_variable, in_a_list, in_a_dict, in_a_tuple, in_a_namespace, in_a_nested_function, in_a_default_value,
        in_a_partial, in_a_partial_of_c, in_an_object_that_is_called, in_a_dataclass, in_an_object,
        in_an_attribute_of_the_rule, in_a_deque, in_a_set, in_an_inner_vjp, in_an_inner_vjp_of_the_output,
        in_an_inner_vjp_of_an_op, in_an_inner_tape, for_a_function, for_an_op_in_f, for_an_op_in_the_rule,
        without_gradients, through_numpy, written_into,
    )
}  # fmt: skip
OPS = {name: op_custom_gradient(f) for name, f in PLACES.items()}


def by_autograd(op, order):
    x = X.clone().requires_grad_()
    value = (op(x) * WEIGHTS).sum()
    for _ in range(order):
        (gradient,) = torch.autograd.grad(value, x, create_graph=order > 1)
        value = gradient.sum()
    return gradient.detach()


def _within(block):
    def derivative(op, order):
        def within(x):
            with block():
                return op(x)

        return by_autograd(within, order)

    return derivative


def _by_func(op, order):
    derivative = lambda x: (op(x) * WEIGHTS).sum()
    for _ in range(order):
        derivative = functools.partial(
            lambda f, x: torch.func.grad(lambda x: f(x).sum())(x), derivative
        )
    return derivative(X)


def _by_vmap(op, order):
    derivative = lambda x, w: op(x) * w
    for _ in range(order):
        derivative = torch.func.grad(derivative)
    return torch.vmap(derivative)(X, WEIGHTS)


TRANSFORMATIONS = {
    "autograd": by_autograd,
    "save_on_cpu": _within(save_on_cpu),
    "checkpoint": lambda op, order: by_autograd(
        lambda x: checkpoint(op, x, use_reentrant=False), order
    ),
    "torch.func.grad": _by_func,
    "vmap": _by_vmap,
}
PULLBACKS = ("in_an_inner_vjp", "in_an_inner_vjp_of_the_output", "in_an_inner_vjp_of_an_op")
OPAQUE = ("in_an_object", "in_an_object_that_is_called", "in_a_set")
MAY_FAIL_IN_THE_FIRST = {
    *(("vmap", place) for place in (*OPAQUE, *PULLBACKS)),
    *(("torch.func.grad", place) for place in PULLBACKS),
    ("save_on_cpu", "in_an_inner_tape"),
}
"""where torch runs a rule when a batch is over; and a leaf that hooks hold may be any leaf"""
WRITTEN = [(t, "written_into") for t in ("autograd", "save_on_cpu", "checkpoint")]
FAILS_IN_TORCH = {
    *((t, place) for t in ("save_on_cpu", "checkpoint") for place in PULLBACKS),
    *WRITTEN,
    *(
        (t, place)
        for t in ("torch.func.grad", "vmap")
        for place in ("in_an_inner_tape", "through_numpy", "written_into")
    ),
}
"""torch.func has no hooks on saved tensors, and its tensors no requires_grad_(), numpy() and out=; nor has
what requires grad an out=, as in the second run of f"""
STOPPED = {(t, "without_gradients") for t in ("torch.func.grad", "vmap")}
"""what f makes under no_grad is a constant to torch.func; eager mode raises an error for its derivative"""


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("place", OPS)
def test_each_order_is_right_or_an_error(place, transformation, order):
    both = transformation, place
    errors = (CustomGradientError,) if order > 1 or both in MAY_FAIL_IN_THE_FIRST else ()
    if both in FAILS_IN_TORCH and (order > 1 or both not in WRITTEN):
        errors += (RuntimeError,)
    if both in STOPPED and order > 1:
        return
    with contextlib.suppress(*errors):
        found = TRANSFORMATIONS[transformation](OPS[place], order)
        torch.testing.assert_close(found, expected(order))


def test_vmap_cannot_see_a_residual_in_an_object():
    with pytest.raises(TransformationError, match=r"in_an_object: .* keeps in an object"):
        _by_vmap(OPS["in_an_object"], 1)


def _that_reads_a_residual(vjp):
    def f(x):
        sine = x.sin()
        _, pullback = vjp(lambda x: x * sine, x)
        return 2 * x, lambda u: pullback(5 * u * x)[0]

    return f


def _of_an_op_that_keeps_one(vjp):
    inner = op_custom_gradient(_that_reads_a_residual(vjp), forward_mode=True)

    def f(x):
        y, pullback = vjp(inner, x)
        return y, lambda u: pullback(u)[0]

    return f


def _of_an_op_that_makes_one(vjp):
    minus_cosine = lambda x: -x.cos()
    inner = op_custom_gradient(
        lambda x: (2 * x, lambda u: vjp(minus_cosine, x)[1](5 * u * x)[0]), forward_mode=True
    )

    def f(x):
        return 2 * x, lambda u: vjp(inner, x)[1](u)[0]

    return f


LEVELS = {
    "func.grad": lambda op: torch.func.grad(lambda x: (op(x) * WEIGHTS).sum())(X),
    "func.grad twice": lambda op: _by_func(op, 2),
    "vmap": lambda op: _by_vmap(op, 2),
    "autograd of func.grad": lambda op: by_autograd(torch.func.grad(lambda x: op(x).sum()), 1),
    "forward mode": lambda op: torch.func.jvp(op, (X,), (WEIGHTS,))[1],
    "forward over reverse": lambda op: torch.func.jacfwd(
        torch.func.grad(lambda x: (op(x) * WEIGHTS).sum())
    )(X),
    "vmap in func.grad": lambda op: torch.func.grad(lambda x: (torch.vmap(op)(x) * WEIGHTS).sum())(
        X
    ),
    "vmap in autograd": lambda op: by_autograd(torch.vmap(op), 2),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "place", [_that_reads_a_residual, _of_an_op_that_keeps_one, _of_an_op_that_makes_one]
)
def test_a_kept_pullback_of_op_vjp_at_each_level(place, level):
    sine_times_5_x = op_custom_gradient(
        lambda x: (2 * x, lambda u: 5 * u * x.sin() * x), forward_mode=True
    )
    op = op_custom_gradient(place(op_vjp), forward_mode=True)
    torch.testing.assert_close(LEVELS[level](op), LEVELS[level](sine_times_5_x))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reads_a_residual", [False, True])
def test_a_kept_pullback_of_torch_func_is_right_or_an_error(reads_a_residual, level):
    f = _that_reads_a_residual(torch.func.vjp) if reads_a_residual else in_an_inner_vjp
    sine_times_5_x = op_custom_gradient(
        lambda x: (2 * x, lambda u: 5 * u * x.sin() * x), forward_mode=True
    )
    with contextlib.suppress(TransformationError):
        found = LEVELS[level](op_custom_gradient(f, forward_mode=True))
        torch.testing.assert_close(found, LEVELS[level](sine_times_5_x))


def _by_a_dual_number(fn):
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(X, WEIGHTS))


@pytest.mark.parametrize(
    "by",
    [
        lambda fn: torch.func.jvp(fn, (X,), (WEIGHTS,)),
        _by_a_dual_number,
        lambda fn: torch.func.jacfwd(torch.func.grad(lambda x: fn(x).sum()))(X),
    ],
)
def test_forward_mode_and_a_residual_in_an_object(by):
    """It is right, or an error."""
    op = op_custom_gradient(in_an_object, forward_mode=True, name="op")
    expected = by(op_custom_gradient(in_a_variable, forward_mode=True))
    with contextlib.suppress(TransformationError, RuntimeError):
        torch.testing.assert_close(by(op), expected)


RIGHT = [
    place
    for place in OPS
    if place not in (*OPAQUE, *PULLBACKS, *("without_gradients", "through_numpy", "in_an_inner_tape", "written_into"))
]  # fmt: skip


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("place", RIGHT)
def test_higher_orders_of_these_places_are_right(place, order):
    torch.testing.assert_close(by_autograd(OPS[place], order), expected(order))


# --- The first order: the very object, on the very tensors ----------------------------------------


def test_the_rule_is_called_itself_on_what_it_holds():
    class Rule:
        def __init__(self, kept):
            self.kept, self.seen = kept, []

        def __call__(self, u):
            self.seen.append(self.kept)
            return 5 * u * self.kept

    made = []

    @op_custom_gradient
    def op(x):
        made.append(Rule(x.cos()))
        return x.sin(), made[-1]

    x = leaf(1.0, 2.0)
    kept = [op(x), made[0].kept]
    (kept[0] * WEIGHTS).sum().backward()
    torch.testing.assert_close(x.grad, 5 * WEIGHTS * X.cos())
    assert len(made) == 1
    assert [t is kept[1] for t in made[0].seen] == [True]


@pytest.mark.parametrize("order", [1, 2])
def test_hooks_on_saved_tensors_keep_all_that_f_made(order):
    """The rule holds none of it meanwhile: offloading frees memory."""
    alive = []

    def pack(t):
        return t.detach().numpy().tolist()

    @op_custom_gradient
    def op(x):
        kept, other = [x.sin()], x.cos()
        alive.extend([weakref.ref(kept[0]), weakref.ref(other)])
        return 2 * x, lambda u: 5 * u * kept[0] * other

    x = leaf(1.0, 2.0)
    with (
        saved_tensors_hooks(pack, lambda v: torch.tensor(v, dtype=torch.float64))
        if order == 1
        else save_on_cpu()
    ):
        y = (op(x) * WEIGHTS).sum()
    gc.collect()
    if order == 1:
        assert [ref() for ref in alive] == [None, None]
        for _ in range(2):
            y.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, 5 * WEIGHTS * (2 * X).sin())
    else:
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, 5 * WEIGHTS * (2 * X).cos())


# --- What is read, and how it depends on the arguments --------------------------------------------


def second_order(op, x=X):
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad((op(x) * WEIGHTS).sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)[0]


def test_a_residual_that_f_computes_from_its_output():
    def f(x):
        y = x.exp()
        z = 2 * y
        return y, lambda u: u * z

    torch.testing.assert_close(second_order(op_custom_gradient(f)), 2 * WEIGHTS * X.exp())


ARRAY = np.array([7.0, 11.0])
TABLE = torch.from_numpy(ARRAY)
DEEP = types.SimpleNamespace(inner=types.SimpleNamespace(table=TABLE))


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
        self.inner[0].running_mean.copy_(TABLE)
        self.register_buffer("scale", TABLE)
        self.log = []

    def of_a_buffer(self, x):
        self.log.append(float(x.sum()))
        return 2 * x, lambda u: u * x * self.scale

    def of_a_module_inside(self, x):
        return 2 * x, lambda u: u * x * self.inner[0].running_mean


def by_the_table(u):
    return u * TABLE


EXISTING = {
    "a global of a helper": lambda x: (2 * x, lambda u: by_the_table(u) * x),
    "a global": lambda x: (2 * x, lambda u: u * x * TABLE),
    "an object in an object": lambda x: (2 * x, lambda u: u * x * DEEP.inner.table),
    "a buffer": Norm().of_a_buffer,
    "a buffer of a module inside": Norm().double().of_a_module_inside,
    "a constant that the rule makes": lambda x: (
        2 * x,
        lambda u: u * x * torch.tensor([7.0, 11.0]),
    ),
    "a constant of NumPy": lambda x: (
        2 * x,
        functools.partial(lambda u: u * x * op_convert_to_tensor(ARRAY)),
    ),
}


@pytest.mark.parametrize("f", EXISTING.values(), ids=EXISTING)
def test_what_existed_before_f_ran_is_a_constant(f):
    torch.testing.assert_close(second_order(op_custom_gradient(f)), WEIGHTS * TABLE)


MADE = {
    "a constant": lambda x: torch.tensor([7.0, 11.0], dtype=x.dtype),
    "a mask": lambda x: 7.0 * (x.detach() > 0).to(x.dtype),
    "a mask at a threshold": lambda x: 7.0 * (x.detach() <= X[1]).to(x.dtype),
    "a rounded number": lambda x: x.detach().round(),
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_residual_that_is_constant_around_the_argument(made):
    @op_custom_gradient
    def op(x):
        residual = made(x)
        return 2 * x, lambda u: u * x * residual

    torch.testing.assert_close(second_order(op), WEIGHTS * made(X))


OPAQUE = {
    "a square": lambda x: x.detach() ** 2,
    "a direction": lambda x: x.detach() / x.detach().norm(),
    "of NumPy": lambda x: torch.from_numpy(np.cos(x.detach().numpy())),
}


@pytest.mark.parametrize("made", OPAQUE.values(), ids=OPAQUE)
def test_a_residual_that_autograd_does_not_see_raises(made):
    @op_custom_gradient(name="op")
    def op(x):
        residual = made(x)
        return 2 * x, lambda u: u * x * residual

    with pytest.raises(TransformationError, match=r"op: a second order .* f64\[2\]"):
        second_order(op)


def test_only_a_residual_that_is_differentiated_is_checked():
    @op_custom_gradient
    def op(x, w):
        sine, cosine = x.sin(), torch.from_numpy(np.cos(w.detach().numpy()))
        return x * w, lambda u: (5 * u * sine, 7 * u * cosine)

    x, w = leaf(1.0, 2.0), leaf(3.0, -2.0)
    of_x, of_w = torch.autograd.grad(op(x, w).sum(), (x, w), create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(of_x.sum(), x, retain_graph=True)[0], 5 * X.cos()
    )
    with pytest.raises(TransformationError, match="op: a second order"):
        torch.autograd.grad((of_x + of_w).sum(), w)


def test_a_residual_of_a_graph_that_f_began_raises():
    @op_custom_gradient
    def op(x):
        with torch.enable_grad():
            kept = x.detach().requires_grad_().sin()
        return 2 * x, lambda u: 5 * u * kept * x

    torch.testing.assert_close(by_autograd(op, 1), expected(1))
    with pytest.raises(TransformationError, match="a second order"):
        second_order(op)


def test_a_derivative_that_is_not_taken_is_no_error():
    w, x = leaf(7.0, 11.0), leaf(1.0, 2.0)
    (first,) = torch.autograd.grad((OPS["through_numpy"](x) * w).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), (5 * w * X.sin() * X).detach())
    (of_w,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(of_w, 5 * X.sin() * X)


# --- Variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", ["both", "beta", "gamma", "none"])
def test_variables_come_in_the_declared_order(keeps):
    gamma, beta, x = leaf(2.0), leaf(3.0), leaf(5.0)

    @op_custom_gradient(variables=[beta, gamma])
    def op(x):
        y = gamma * x + beta
        held = {"both": (beta, gamma), "beta": (beta,), "gamma": (gamma,), "none": ()}[keeps]

        def rule(u, variables):
            assert len(held) <= 2
            assert [v is w for v, w in zip(variables, (beta, gamma), strict=True)] == [True, True]
            return u * 2, [u * 11, u * x * 7]

        return y, rule

    assert [g.item() for g in torch.autograd.grad(op(x), (gamma, beta))] == [35, 11]


@pytest.mark.parametrize("make", [torch.nn.Linear(2, 2).double(), torch.nn.LayerNorm(2).double()])
def test_variables_of_a_module_are_its_parameters(make):
    seen = []

    def f(x):
        return make(x), lambda u, variables: (u, [seen.append(v) for v in variables])

    op = op_custom_gradient(f, variables=lambda: [*make.parameters()])
    op(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert [v is p for v, p in zip(seen, (make.weight, make.bias), strict=True)] == [True, True]


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_a_variable_that_changes_before_the_backward_pass(changed):
    state = {
        "weight": torch.nn.Parameter(torch.tensor([7.0])),
        "bias": torch.nn.Parameter(torch.tensor([3.0])),
    }

    @op_custom_gradient(variables=state)
    def op(x):
        y = x * state["weight"] + state["bias"]
        return y, lambda u, variables: (u * variables["weight"], {"weight": u * x, "bias": u})

    y = op(torch.tensor([2.0], requires_grad=True))
    with torch.no_grad():
        state[changed].add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.backward()


# --- Where torch itself sees no derivative --------------------------------------------------------


def _by_data(x, u):
    return 5 * u * x.sin().data * x


def _by_numbers(x, u):
    return 5 * u * torch.tensor([np.sin(each.item()) for each in x]) * x


def _by_numpy(x, u):
    return 5 * u * torch.from_numpy(np.sin(x.detach().numpy())) * x


@pytest.mark.parametrize("rule", [_by_data, _by_numbers, _by_numpy])
def test_a_rule_that_takes_numbers_out_of_torch_is_as_by_hand(rule):
    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, u):
            return rule(*ctx.saved_tensors, u)

    op = op_custom_gradient(lambda x: (2 * x, lambda u: rule(x, u)))
    torch.testing.assert_close(second_order(op), second_order(ByHand.apply))


def _with_vmap(x):
    kept = x.sin()
    return 2 * x, lambda u: 5 * torch.vmap(lambda a, b: a * b)(u, kept) * x


def _with_hessian(x):
    return 2 * x, lambda u: u * torch.func.hessian(lambda x: (5 * x**4 / 12).sum())(x).sum(0)


def test_a_rule_takes_a_hessian():
    torch.testing.assert_close(second_order(op_custom_gradient(_with_hessian)), 10 * WEIGHTS * X)


def test_a_rule_takes_a_vmap_over_a_residual():
    torch.testing.assert_close(second_order(op_custom_gradient(_with_vmap)), expected(2))
