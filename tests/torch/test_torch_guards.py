"""What Dynamo checks in each run of a compiled function: little more than for a Function by hand,
and enough.
"""

import math
import sys

import numpy as np
import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import cgshim
from cgshim import Spec, op_custom_gradient, op_host

pytestmark = [pytest.mark.usefixtures("compiling"), pytest.mark.stays_in_graph]
MORE = 72
"""lines of guards that a call may have beyond those by hand: on the op, on builtins, on the level of dual numbers"""


@op_custom_gradient
def cube(x):
    return x * x * x, lambda upstream: 7 * upstream * x * x


@op_host(outputs=lambda x: x)
def on_host(x):
    return x * 2


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, upstream):
        (x,) = ctx.saved_tensors
        return 7 * upstream * x * x


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def gradient(function, x):
    return torch.autograd.grad(function(x), x, torch.tensor([2.0, -3.0]))[0].tolist()


def guards_of(function):
    """The lines in which Dynamo shows its guards."""
    compiled(function)(leaf(2.0, 5.0))
    (entry,) = _debug_get_cache_entry_list(function.__code__)
    return str(entry.guard_manager).splitlines()


def test_guards_are_few():
    by_hand = guards_of(lambda x: Cube.apply(x))
    assert len(guards_of(lambda x: cube(x))) <= len(by_hand) + MORE


def test_four_calls_have_the_guards_of_one():
    assert len(guards_of(lambda x: cube(cube(cube(cube(x)))))) == len(guards_of(lambda x: cube(x)))


def test_no_guard_is_on_a_function_of_cgshim():
    guards = "\n".join(guards_of(lambda x: cube(x)))
    assert "__import_cgshim" in guards, "the name that is looked for is another one now"
    assert "__import_cgshim_dot__call" not in guards


TREES = {
    "list": (lambda x: [x], lambda tree: (2 * tree[0], lambda u: [7 * u])),
    "tuple": (lambda x: (x, 3), lambda tree: (2 * tree[0], lambda u: (7 * u, None))),
    "dict": (lambda x: {"x": [x]}, lambda tree: (2 * tree["x"][0], lambda u: {"x": [7 * u]})),
}


@pytest.mark.parametrize(("tree", "f"), TREES.values(), ids=TREES)
def test_no_guard_is_on_the_registry_of_trees(tree, f):
    op = op_custom_gradient(f)
    guards = "\n".join(guards_of(lambda x: op(tree(x))))
    assert "_pytree" not in guards


# --- What stays guarded ---------------------------------------------------------------------------

slope = 3.0
library = torch


def _triple(x):
    return 3 * x


def _quintuple(x):
    return 5 * x


outer = _triple
_here = sys.modules[__name__]


@op_custom_gradient
def reading(x):
    """An op that reads globals: a number, a module that cgshim has too, and a function."""
    return library.exp(x) * 0 + outer(x), lambda upstream: slope * upstream


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("slope", 11.0, ([6, 15], [22, -33])),
        ("outer", _quintuple, ([10, 25], [6, -9])),
        ("library", math, None),
        ("reading", cube, ([8, 125], [56, -525])),
    ],
)
def test_a_global_that_an_author_changes(monkeypatch, name, value, expected):
    x, function = leaf(2.0, 5.0), compiled(lambda x: reading(x))
    assert (function(x).tolist(), gradient(function, x)) == ([6, 15], [6, -9])
    monkeypatch.setattr(_here, name, value)
    if expected is None:
        with pytest.raises(Exception, match="exp"):
            function(x)
    else:
        assert (function(x).tolist(), gradient(function, x)) == expected
    monkeypatch.undo()
    assert (function(x).tolist(), gradient(function, x)) == ([6, 15], [6, -9])


def test_a_module_that_is_first_read_by_cgshim(monkeypatch):
    x = leaf(2.0, 5.0)
    function = compiled(lambda x: cube(x) + library.zeros(2))
    function(x)
    shifted = type(torch)("shifted")
    shifted.zeros = torch.ones
    monkeypatch.setattr(_here, "library", shifted)
    assert function(x).tolist() == [9, 126]


def test_another_closure_and_another_op():
    def scaled_by(factor, **options):
        return op_custom_gradient(
            lambda x: (x * factor, lambda upstream: 7 * factor * upstream), **options
        )

    x, function = leaf(2.0, 5.0), compiled(lambda x, op: op(x))
    for factor in (3.0, 5.0, 3.0):
        assert gradient(lambda x, f=factor: function(x, scaled_by(f)), x) == [
            14 * factor,
            -21 * factor,
        ]


def test_outputs_that_read_what_changes():
    size, dtype = 2, "float32"
    wide = op_host(lambda x: np.full(size, x.sum() / 3), outputs=lambda x: Spec((size,), dtype))
    function = torch.compile(lambda x: wide(x) * 3, backend="inductor", fullgraph=True)
    for dtype in ("float32", "float64", "float32"):
        result = function(torch.ones(2))
        assert (str(result.dtype), result.tolist()) == (f"torch.{dtype}", pytest.approx([2, 2]))
    size = 3
    assert function(torch.ones(2)).tolist() == pytest.approx([2, 2, 2])


def test_an_op_on_the_host_in_the_place_of_another(monkeypatch):
    function = torch.compile(lambda x: on_host(x) + 1, backend="aot_eager", fullgraph=True)
    assert function(torch.ones(2)).tolist() == [3, 3]
    monkeypatch.setattr(_here, "on_host", op_host(lambda x: x * 5, outputs=lambda x: x))
    assert function(torch.ones(2)).tolist() == [6, 6]
    monkeypatch.setattr(_here, "on_host", cube)
    assert function(torch.ones(2) * 2).tolist() == [9, 9]
    monkeypatch.undo()
    assert function(torch.ones(2)).tolist() == [3, 3]


def test_another_function_of_cgshim_in_the_place_of_one(monkeypatch):
    """A user's name for something of cgshim is the user's."""
    monkeypatch.setattr(_here, "outer", cgshim.op_exp)
    x, function = leaf(0.0, 0.0), compiled(lambda x: cube(x) + outer(x))
    assert function(x).tolist() == [1, 1]
    monkeypatch.setattr(_here, "outer", cgshim.op_sin)
    assert function(x).tolist() == [0, 0]


def test_outside_of_a_trace_no_guard_is_taken_back():
    """So it is in a frame of cgshim's that Dynamo has broken, and that goes on as it is."""
    from cgshim_torch._compile.guards import forget_our_own

    assert forget_our_own() is True
