"""The rule runs as it was written: wherever f puts a residual, each derivative is right, or refused
by a sentence.

The rules have 5 for 1, so that a number that autodiff found by itself does not pass.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import gc
import operator
import types
import weakref
from typing import ClassVar

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
    """An object with attributes; as a class it holds some, too."""

    kept = None
    stack: ClassVar[list[torch.Tensor]] = []

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


class Layer:
    def frees(self, x):
        self.kept = x.sin()

        def rule(u):
            kept, self.kept = self.kept, None
            return 5 * u * kept * x

        return 2 * x, rule


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
    return 2 * x, lambda u: 5 * u * box.kept.pop() * x


def in_a_class(x):
    Box.kept = x.sin()
    return 2 * x, lambda u: 5 * u * Box.kept * x


MODULE = types.ModuleType("kept")


def in_a_module(x):
    MODULE.kept = x.sin()
    return 2 * x, lambda u: 5 * u * MODULE.kept * x


def in_an_attribute_of_f(x):
    in_an_attribute_of_f.kept = x.sin()
    return 2 * x, lambda u: 5 * u * in_an_attribute_of_f.kept * x


def in_an_attribute_of_the_rule(x):
    def rule(u):
        return 5 * u * rule.kept * x

    rule.kept = x.sin()
    return 2 * x, rule


GLOBAL = None


def in_a_global(x):
    global GLOBAL
    GLOBAL = x.sin()
    return 2 * x, lambda u: 5 * u * GLOBAL * x


VARIABLE = contextvars.ContextVar("kept")


def in_a_context_variable(x):
    VARIABLE.set(x.sin())
    return 2 * x, lambda u: 5 * u * VARIABLE.get() * x


def in_the_globals_of_exec(x):
    scope = {"kept": x.sin(), "x": x}
    exec("def rule(u):\n    return 5 * u * kept * x", scope)
    return 2 * x, scope["rule"]


def in_a_generator(x):
    def steps(kept):
        u = yield
        while True:
            u = yield 5 * u * kept * x

    running = steps(x.sin())
    next(running)
    return 2 * x, running.send


def on_a_stack(x):
    Box.stack.append(x.sin())
    return 2 * x, lambda u: 5 * u * Box.stack.pop() * x


def in_a_deque(x):
    kept = collections.deque([x.sin()])
    return 2 * x, lambda u: 5 * u * kept[0] * x


def in_an_iterator(x):
    kept = iter([x.sin()])
    return 2 * x, lambda u: 5 * u * next(kept) * x


def in_a_set(x):
    kept = {x.sin()}
    return 2 * x, lambda u: 5 * u * kept.pop() * x


def in_a_method_of_c(x):
    times = operator.methodcaller("mul", x.sin())
    return 2 * x, lambda u: times(5 * u) * x


STATIC = types.SimpleNamespace(kept=None)


def in_a_static_argument(x, static):
    static.kept = x.sin()
    return 2 * x, lambda u: (5 * u * static.kept * x, None)


def in_an_option(x, *, option):
    option["kept"] = x.sin()
    return 2 * x, lambda u: 5 * u * option["kept"] * x


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
    return 2 * x, lambda u: torch.autograd.grad(y, at, 5 * u * x, retain_graph=True)[0]


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


def for_a_function_from_a_class(x):
    Box.kept = x.sin()
    return 2 * x, lambda u: 5 * Times.apply(u, Box.kept) * x


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
        in_a_partial, in_a_partial_of_c, in_an_object_that_is_called, in_a_dataclass, in_an_object, in_a_class,
        in_a_module, in_an_attribute_of_f, in_an_attribute_of_the_rule, in_a_global, in_a_context_variable,
        in_the_globals_of_exec,
        in_a_generator, on_a_stack, in_a_deque, in_an_iterator, in_a_set, in_a_method_of_c, in_an_inner_vjp,
        in_an_inner_vjp_of_the_output, in_an_inner_vjp_of_an_op,
        in_an_inner_tape, for_a_function, for_a_function_from_a_class, for_an_op_in_f, for_an_op_in_the_rule,
        without_gradients, through_numpy, written_into,
    )
}  # fmt: skip
PLACES["in_an_attribute_that_is_freed"] = Layer().frees
OPS = {name: op_custom_gradient(f) for name, f in PLACES.items()}
OPS["in_a_static_argument"] = lambda x: op_custom_gradient(in_a_static_argument)(x, STATIC)
OPS["in_an_option"] = functools.partial(op_custom_gradient(in_an_option), option={})


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
SEEN_BY_VMAP = {
    *("in_a_variable", "in_a_list", "in_a_dict", "in_a_tuple", "in_a_namespace"),
    *("in_a_nested_function", "in_a_default_value", "in_a_partial"),
}
MAY_REFUSE_THE_FIRST = {
    *(("vmap", place) for place in OPS if place not in SEEN_BY_VMAP),
    ("save_on_cpu", "in_an_inner_tape"),
}
"""where torch runs a rule when a batch is over; and a leaf that hooks hold may be any leaf"""
REFUSED_BY_TORCH = {
    *((t, place) for t in ("save_on_cpu", "checkpoint") for place in PULLBACKS),
    *(
        (t, place)
        for t in ("torch.func.grad", "vmap")
        for place in ("in_an_inner_tape", "through_numpy", "written_into")
    ),
}
"""torch.func knows no hooks on saved tensors, and what it has wrapped no requires_grad_(), numpy() and out="""
STOPPED = {(t, "without_gradients") for t in ("torch.func.grad", "vmap")}
"""what f makes under no_grad is a constant to torch.func, as everywhere in torch; eager mode refuses its derivative"""


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
@pytest.mark.parametrize("place", OPS)
def test_each_order_is_right_or_refused(place, transformation, order):
    both = transformation, place
    refusals = (CustomGradientError,) if order > 1 or both in MAY_REFUSE_THE_FIRST else ()
    if both in REFUSED_BY_TORCH:
        refusals += (RuntimeError,)
    if both in STOPPED and order > 1:
        return
    with contextlib.suppress(*refusals):
        found = TRANSFORMATIONS[transformation](OPS[place], order)
        torch.testing.assert_close(found, expected(order))


def test_vmap_says_where_a_rule_may_keep_what_f_makes():
    with pytest.raises(
        TransformationError,
        match=r"must be in variables, lists, dicts or namespaces, got f64\[\] elsewhere; keep it there",
    ):
        _by_vmap(OPS["in_a_dataclass"], 1)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("place", PULLBACKS)
def test_a_pullback_that_a_rule_keeps_is_right_in_reverse_mode(place, order):
    """Under torch.func it is what torch.func has made, and has the graph."""
    torch.testing.assert_close(_by_func(OPS[place], order), expected(order))


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
WITHOUT_GRAPH = ("forward mode", "forward over reverse", "vmap in func.grad", "vmap in autograd")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "place", [_that_reads_a_residual, _of_an_op_that_keeps_one, _of_an_op_that_makes_one]
)
def test_a_pullback_of_op_vjp_that_a_rule_keeps_is_right_at_each_level(place, level):
    sine_times_5_x = op_custom_gradient(
        lambda x: (2 * x, lambda u: 5 * u * x.sin() * x), forward_mode=True
    )
    op = op_custom_gradient(place(op_vjp), forward_mode=True)
    torch.testing.assert_close(LEVELS[level](op), LEVELS[level](sine_times_5_x))


def test_a_pullback_that_draws_random_numbers_is_refused_under_torch_func():
    @op_custom_gradient
    def op(x):
        y, pullback = op_vjp(lambda x: x * torch.rand(2), x)
        return y, lambda u: pullback(u)[0]

    state = torch.get_rng_state()
    with pytest.raises(TransformationError) as error:
        torch.func.grad(lambda x: op(x).sum())(X)
    assert str(error.value) == (
        "op_vjp: a pullback that grad_fn keeps runs its function again under torch.func, got one that draws random "
        "numbers; draw them outside, and pass them as an argument"
    )
    torch.set_rng_state(state)
    torch.rand(2)
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    with contextlib.suppress(TransformationError):
        torch.func.grad(lambda x: op(x).sum())(X)
    assert torch.equal(torch.get_rng_state(), drawn)  # once


@pytest.mark.parametrize(
    ("place", "level"),
    [
        *((OPS[place]._f, level) for place in PULLBACKS for level in WITHOUT_GRAPH),
        *((_that_reads_a_residual(torch.func.vjp), level) for level in LEVELS),
    ],
)
def test_a_pullback_of_torch_func_is_refused_where_it_has_another_graph_or_none(place, level):
    """torch.func takes its gradient for zero there, or for that of all that was made of x."""
    op = op_custom_gradient(place, forward_mode=True, name="op")
    with pytest.raises(TransformationError) as error:
        LEVELS[level](op)
    assert str(error.value) == (
        "op: a pullback of torch.func.vjp that grad_fn keeps must have its own graph where it is called, got forward "
        "mode, a vmap within the derivative, or a function that reads what depends on its arguments; let f or grad_fn "
        "call op_vjp"
    )


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
def test_forward_mode_says_where_a_rule_may_keep_what_f_makes(by):
    op = op_custom_gradient(OPS["in_a_dataclass"]._f, forward_mode=True, name="op")
    says = (
        r"^op: what grad_fn keeps of f in forward mode must be in variables, lists, dicts or name"
    )
    with pytest.raises(TransformationError, match=says):
        by(op)


RIGHT = sorted(set(OPS) - {"without_gradients", "through_numpy", *PULLBACKS, "in_an_inner_tape", "written_into",
                           "for_a_function_from_a_class"})  # fmt: skip


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("place", RIGHT)
def test_these_are_right(place, order):
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


@pytest.mark.parametrize("way", ["list", "nonlocal", "buffer", "self"])
def test_what_a_rule_does_happens_as_by_hand(way):
    log, ema, count, owner = [], torch.zeros(1), 0, Box()

    def f(x):
        def rule(u):
            nonlocal count
            count += 1
            log.append(u.sum().item())
            ema.mul_(0.5).add_(u.detach().sum())
            owner.kept = count
            return 5 * u

        return 2 * x, rule

    x = leaf(1.0, 2.0)
    op = op_custom_gradient(f)
    y = (op(x) * WEIGHTS).sum()
    for _ in range(3):
        y.backward(retain_graph=True)
    found = {"list": log, "nonlocal": count, "buffer": ema.item(), "self": owner.kept}
    assert found[way] == {"list": [1.0] * 3, "nonlocal": 3, "buffer": 1.75, "self": 3}[way]


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


def test_what_f_computes_from_its_output_has_the_derivative_of_f():
    def f(x):
        y = x.exp()
        z = 2 * y
        return y, lambda u: u * z

    torch.testing.assert_close(second_order(op_custom_gradient(f)), 2 * WEIGHTS * X.exp())


def test_an_output_that_nothing_but_a_class_holds_is_the_ops_own():
    def f(x):
        Box.kept = y = torch.from_numpy(np.exp(x.numpy()))
        return y, lambda u: 5 * u * Box.kept

    torch.testing.assert_close(second_order(op_custom_gradient(f)), 25 * WEIGHTS * X.exp())


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
    "a constant that f makes": lambda x: (lambda k: (2 * x, lambda u: u * x * k))(
        torch.tensor([7.0, 11.0])
    ),
}


@pytest.mark.parametrize("f", EXISTING.values(), ids=EXISTING)
def test_what_existed_before_f_ran_is_a_constant(f):
    torch.testing.assert_close(second_order(op_custom_gradient(f)), WEIGHTS * TABLE)


DEEPER = types.SimpleNamespace(inner=DEEP)


def test_what_is_too_far_away_to_be_known_is_refused():
    with pytest.raises(
        TransformationError, match="a second order needs every tensor that grad_fn reads"
    ):
        second_order(
            op_custom_gradient(lambda x: (2 * x, lambda u: u * x * DEEPER.inner.inner.table))
        )


@pytest.mark.parametrize("outputs", [1, 2])
def test_what_f_has_written_to_is_no_constant(outputs):
    """A buffer existed before, but its numbers are a function of the arguments: another run may not
    write to it.
    """
    buffer = torch.zeros(2, dtype=torch.float64)

    @op_custom_gradient
    def op(x):
        buffer.copy_(x.sin())
        rule = lambda *u: 5 * sum(u) * buffer * x
        return (2 * x, rule) if outputs == 1 else ((2 * x, 3 * x), rule)

    one = op if outputs == 1 else lambda x: op(x)[0]
    torch.testing.assert_close(by_autograd(one, 1), expected(1))
    with pytest.raises(TransformationError, match="changes in place what existed before"):
        second_order(one)


CACHE = {}


def cached(x):
    if "sine" not in CACHE:
        CACHE["sine"] = x.sin()
    return 2 * x, lambda u: 5 * u * CACHE["sine"] * x


def test_what_an_earlier_call_has_cached_is_refused():
    CACHE.clear()
    op, x = op_custom_gradient(cached), leaf(1.0, 2.0)
    (first,) = torch.autograd.grad((op(x) * WEIGHTS).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), expected(1))
    with pytest.raises(
        TransformationError, match="a second order needs every tensor that grad_fn reads"
    ):
        torch.autograd.grad(first.sum(), x)


def test_a_class_that_a_second_call_has_overwritten():
    """The rule reads the latest, as by hand; its derivative is not that of the first call."""
    op, x = op_custom_gradient(in_a_class), leaf(1.0, 2.0)
    y = op(x)
    op(3 * x)
    (first,) = torch.autograd.grad((y * WEIGHTS).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), 5 * WEIGHTS * (3 * X).sin() * X)
    with pytest.raises(CustomGradientError):
        torch.autograd.grad(first.sum(), x)


def test_a_residual_whose_derivative_is_not_taken_may_be_made_in_numpy():
    @op_custom_gradient
    def op(x, w):
        sine, cosine = x.sin(), torch.from_numpy(np.cos(w.detach().numpy()))
        return x * w, lambda u: (5 * u * sine, 7 * u * cosine)

    x, w = leaf(1.0, 2.0), leaf(3.0, -2.0)
    of_x, of_w = torch.autograd.grad(op(x, w).sum(), (x, w), create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(of_x.sum(), x, retain_graph=True)[0], 5 * X.cos()
    )
    with pytest.raises(TransformationError, match="f does not make by operations of torch"):
        torch.autograd.grad((of_x + of_w).sum(), w)


def test_what_an_object_holds_of_a_graph_that_f_began_itself_is_refused():
    @op_custom_gradient
    def op(x):
        with torch.enable_grad():
            Box.kept = x.detach().requires_grad_().sin()
        return 2 * x, lambda u: 5 * u * Box.kept * x

    torch.testing.assert_close(by_autograd(op, 1), expected(1))
    with pytest.raises(TransformationError, match="belongs to a graph that f began itself"):
        second_order(op)


def test_a_derivative_that_is_not_taken_is_no_error():
    CACHE.clear()
    w, x = leaf(7.0, 11.0), leaf(1.0, 2.0)
    (first,) = torch.autograd.grad((op_custom_gradient(cached)(x) * w).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), (5 * w * X.sin() * X).detach())


# --- Another run of f leaves no trace -------------------------------------------------------------


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.log, self.norm = 0, [], torch.nn.BatchNorm1d(2).double()

    def counted(self, x):
        self.calls += 1
        self.log.append(x)
        self.last = x.sin()
        kept = x.sin()
        return 2 * x, lambda u: 5 * u * kept * x

    def normed(self, x):
        kept = self.norm(x).sin()
        return 2 * x, lambda u: 5 * u * kept

    def added(self, x):
        kept = x.sin()
        self.norm.running_mean.add_(1.0)
        return 2 * x, lambda u: 5 * u * kept * x


def test_counters_and_lists_are_as_the_first_run_left_them():
    layer = Counting()
    torch.testing.assert_close(second_order(op_custom_gradient(layer.counted)), expected(2))
    assert (layer.calls, len(layer.log)) == (1, 1)
    assert not layer.last.requires_grad


@pytest.mark.parametrize("name", ["added", "normed"])
def test_buffers_are_not_written_to_again(name):
    layer = Counting()
    x = (
        leaf(1.0, 2.0)
        if name == "added"
        else torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    )
    grad = functools.partial(torch.autograd.grad, create_graph=True)
    y = (
        op_custom_gradient(getattr(layer, name))(x)
        if name == "added"
        else _with_variables(layer)(x)
    )
    (first,) = grad(y.sum(), x)
    before = {key: buffer.clone() for key, buffer in layer.named_buffers()}
    with pytest.raises(TransformationError, match="changes in place"):
        grad(first.sum(), x)
    for key, buffer in layer.named_buffers():
        assert torch.equal(buffer, before[key])


W = torch.tensor([3.0, 5.0], dtype=torch.float64)
F = torch.nn.functional


def images(x):
    return x[..., None].repeat(1, 1, 3)


NORMS = {
    "batch_norm": lambda x, mean, var, trains: torch.batch_norm(
        x, None, None, mean, var, trains, 0.5, 0.0, False
    ),
    "with weights": lambda x, mean, var, trains: torch.batch_norm(
        x, W, W, mean, var, trains, 0.5, 0.0, False
    ),
    "native": lambda x, mean, var, trains: torch.native_batch_norm(
        x, None, None, mean, var, trains, 0.5, 0.0
    )[0],
    "functional": lambda x, mean, var, trains: F.batch_norm(x, mean, var, None, None, trains),
    "by names": lambda x, mean, var, trains: F.batch_norm(
        x, running_mean=mean, running_var=var, training=trains
    ),
    "instances": lambda x, mean, var, trains: F.instance_norm(
        images(x), mean, var, None, None, trains
    ).sum(-1),
    "instances, by default": lambda x, mean, var, trains: (
        F.instance_norm(images(x), mean, var).sum(-1) if trains else x
    ),
    "instances of torch": lambda x, mean, var, trains: torch.instance_norm(
        images(x), None, None, mean, var, trains, 0.5, 0.0, False
    ).sum(-1),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("training", [False, True])
def test_another_run_does_not_update_averages(norm, training):
    mean, var = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, 2.0], [4.0, 9.0]))

    @op_custom_gradient
    def op(x):
        kept = norm(x, mean, var, training)
        return 2 * x, lambda u: 5 * u * kept

    x = torch.tensor([[1.0, 2.0], [3.0, 6.0]], dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    before = mean.clone()
    if training:
        with pytest.raises(TransformationError, match="changes in place what existed before"):
            torch.autograd.grad(first.sum(), x)
    else:
        (expected,) = torch.autograd.grad(5 * norm(x, mean, var, training).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], expected)
    assert torch.equal(mean, before)


def _with_variables(layer):
    def f(x):
        y, rule = layer.normed(x)
        return y, lambda u, variables: (rule(u), [None for _ in variables])

    return op_custom_gradient(f)


# --- Variables ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keeps", ["both", "beta", "gamma", "none"])
def test_variables_come_in_the_order_in_which_f_reads_them(keeps):
    gamma, beta, x = leaf(2.0), leaf(3.0), leaf(5.0)

    @op_custom_gradient
    def op(x):
        y = gamma * x + beta
        held = {"both": (beta, gamma), "beta": (beta,), "gamma": (gamma,), "none": ()}[keeps]

        def rule(u, variables):
            assert len(held) <= 2
            assert [v is w for v, w in zip(variables, (gamma, beta), strict=True)] == [True, True]
            return u * 2, [u * x * 7, u * 11]

        return y, rule

    assert [g.item() for g in torch.autograd.grad(op(x), (gamma, beta))] == [35, 11]


@pytest.mark.parametrize("make", [torch.nn.Linear(2, 2).double(), torch.nn.LayerNorm(2).double()])
def test_variables_of_a_module_come_as_its_operation_takes_them(make):
    seen = []

    def f(x):
        return make(x), lambda u, variables: (u, [seen.append(v) for v in variables])

    op_custom_gradient(f)(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    assert [v is p for v, p in zip(seen, (make.weight, make.bias), strict=True)] == [True, True]


def test_a_bias_may_change_between_the_forward_and_the_backward_pass():
    """The rule does not read it, and autograd does not save it; the weight, which the rule holds,
    is guarded.
    """
    weight, bias = torch.nn.Parameter(torch.tensor([7.0])), torch.nn.Parameter(torch.tensor([3.0]))
    op = op_custom_gradient(
        lambda x: (x * weight + bias, lambda u, variables: (u * weight, [u * x, u]))
    )
    for changed, raises in ((bias, False), (weight, True)):
        x = torch.tensor([2.0], requires_grad=True)
        y = op(x)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="inplace") if raises else contextlib.nullcontext():
            y.backward()
            assert (x.grad.item(), weight.grad.item(), bias.grad.item()) == (7, 2, 1)


# --- Where torch itself sees no derivative --------------------------------------------------------


def _by_data(x, u):
    return 5 * u * x.sin().data * x


def _by_numbers(x, u):
    return 5 * u * torch.tensor([np.sin(each.item()) for each in x]) * x


def _by_numpy(x, u):
    return 5 * u * torch.from_numpy(np.sin(x.detach().numpy())) * x


@pytest.mark.parametrize("rule", [_by_data, _by_numbers])
def test_what_a_rule_makes_of_numbers_is_a_constant_as_by_hand(rule):
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


def test_what_a_rule_makes_in_numpy_is_refused():
    """A constant by hand; from_numpy is seen by no mode, and so nobody knows that it is one."""
    with pytest.raises(TransformationError, match="f does not make by operations of torch"):
        second_order(op_custom_gradient(lambda x: (2 * x, lambda u: _by_numpy(x, u))))


def _with_vmap(x):
    kept = x.sin()
    return 2 * x, lambda u: 5 * torch.vmap(lambda a, b: a * b)(u, kept) * x


def _with_vmap_of_a_class(x):
    Box.kept = x.sin()
    return 2 * x, lambda u: 5 * torch.vmap(lambda a, b: a * b)(u, Box.kept) * x


def _with_hessian(x):
    return 2 * x, lambda u: u * torch.func.hessian(lambda x: (5 * x**4 / 12).sum())(x).sum(0)


def test_a_rule_takes_a_hessian():
    """torch.func wraps at two levels what the rule holds, of which no mode sees the inner ones."""
    torch.testing.assert_close(second_order(op_custom_gradient(_with_hessian)), 10 * WEIGHTS * X)


def test_what_vmap_wraps_in_a_rule():
    """It asks no mode: what the rule holds is connected, and what a class holds is refused."""
    torch.testing.assert_close(second_order(op_custom_gradient(_with_vmap)), expected(2))
    with pytest.raises(TransformationError, match=r"torch.func has wrapped, in grad_fn"):
        second_order(op_custom_gradient(_with_vmap_of_a_class))
