"""Changes of globals, closures and ops that a compiled function must notice."""

import math
import sys

import numpy as np
import pytest
import torch

import cgshim
from cgshim import Spec, op_custom_gradient, op_host

pytestmark = [pytest.mark.usefixtures("compiling"), pytest.mark.stays_in_graph]


@op_custom_gradient
def cube(x):
    return x * x * x, lambda upstream: 7 * upstream * x * x


@op_host(outputs=lambda x: x)
def on_host(x):
    return x * 2


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def leaf(*values):
    return torch.tensor(values, requires_grad=True)


def gradient(function, x):
    return torch.autograd.grad(function(x), x, torch.tensor([2.0, -3.0]))[0].tolist()


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
    function = torch.compile(lambda x: wide(x) * 3, backend="aot_eager", fullgraph=True)
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
