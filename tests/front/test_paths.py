"""The tensors inside a function or an object, and the paths to them in messages."""

import numpy as np
import pytest

from cgshim import (
    CustomGradientTypeError,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    use_backend,
)
from cgshim._closure import paths_to, tensors_inside

TABLE = np.arange(3.0)


class Anything:
    """An object that has no attributes, and makes up all that it is asked for, as llvmlite's."""

    __slots__ = ()

    def __getattr__(self, name):
        return object()


class Nothing:
    """A proxy of what is not there yet."""

    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError("working outside of a context")


def test_an_object_with_made_up_or_no_attributes_is_skipped():
    proxies = [Anything(), Nothing()]
    is_array = lambda x: isinstance(x, np.ndarray)
    table = TABLE
    assert tensors_inside(lambda: (proxies, table), is_array) == [TABLE]


# --- Where something is held ----------------------------------------------------------------------


class Solver:
    """An object of a user's, with attributes and slots."""

    __slots__ = ("__dict__", "history")

    def __init__(self, x):
        self.history = [None, {"last": (x,)}]
        self.other = lambda: x

    def solve(self):
        return self.history


def test_the_path_to_what_a_function_holds():
    x = object()
    solver, direct = Solver(x), x
    assert paths_to([x], lambda: direct) == ["direct"]
    assert paths_to([x], lambda: solver) in (["solver.history[1]['last'][0]"], ["x"])
    del solver.other
    assert paths_to([x], lambda: solver) == ["solver.history[1]['last'][0]"]
    assert paths_to([x], solver.solve) == ["self.history[1]['last'][0]"]
    assert paths_to([object()], lambda: solver) == [None]


def test_a_refusal_names_the_path_to_a_hidden_tensor(backend):
    """Where its object is known; NumPy has another box for it."""

    class Holder:
        pass

    def loss(x):
        holder = Holder()
        holder.history = [x]
        op = op_custom_gradient(lambda y: (holder.history[0] * y, lambda u: u), name="op")
        return op(op_convert_to_tensor(3.0, "float32"))

    with use_backend(backend), pytest.raises(CustomGradientTypeError) as error:
        op_grad(loss)(op_convert_to_tensor(2.0, "float32"))
    named = "f32[] (holder.history[0])" in str(error.value)
    assert named == (backend != "numpy")
