"""What goes wrong in f raises the framework's own error, with a note that says what to write
instead.
"""

import sys

import numpy as np
import pytest

from cgshim import op_custom_gradient, op_grad
from cgshim.testing.conformance import Framework

ON_HOST = (
    "op: f must run where its arguments have no values yet, or are differentiated, got NumPy or Python at work on a "
    "tensor; call functions of cgshim.ops, or let it run on the host: op_custom_gradient(host_outputs=...), op_host"
)
BRANCH = (
    "op: f must run where its arguments have no values yet, got a branch on a tensor; "
    "write ops.where for elements, op_cond for programs"
)
VECTOR = "op: @ of TensorFlow takes matrices, got a vector; write ops.matmul"


def notes_of(op, *args):
    """cgshim's notes on what a call raises, which is in the framework's own words."""
    with pytest.raises(Exception, match=r".") as caught:
        op(*args)
    assert not type(caught.value).__module__.startswith("cgshim")
    if sys.version_info < (3, 11):
        return str(caught.value).split("\n")[-1:]
    return [note for note in caught.value.__notes__ if " must " in note or " takes " in note]


def traced(backend, op):
    """A function that calls op with a tensor that has no value yet, or with one that requires grad."""
    if backend == "jax":
        return sys.modules["jax"].jit(lambda x: op(x))
    if backend == "tensorflow":
        return sys.modules["tensorflow"].function(lambda x: op(x), autograph=False)
    return sys.modules["torch"].func.vmap(lambda x: op(x))


@pytest.fixture
def framework(backend):
    if backend == "numpy":
        pytest.skip("NumPy's tensors have values, and its functions take them")
    return Framework(backend)


def test_numpy_in_f(backend, framework):
    op = op_custom_gradient(lambda x: (np.exp(x), lambda upstream: upstream), name="op")
    assert notes_of(traced(backend, op), framework.tensor([[1.0, 2.0]])) == [ON_HOST]


def test_a_number_of_a_tensor(backend, framework):
    op = op_custom_gradient(lambda x: (x * float(x[0]), lambda upstream: upstream), name="op")
    assert notes_of(
        traced(backend, op), framework.tensor([1.0, 2.0] if backend != "torch" else [[1.0]])
    ) == [ON_HOST]


def test_a_branch_on_a_tensor(backend, framework):
    op = op_custom_gradient(
        lambda x: (x if (x > 0.0).any() else -x, lambda upstream: upstream), name="op"
    )
    if backend == "tensorflow":  # whose tensors have no method any
        op = op_custom_gradient(
            lambda x: (x if x[0, 0] > 0.0 else -x, lambda upstream: upstream), name="op"
        )
    assert notes_of(traced(backend, op), framework.tensor([[1.0, 2.0]])) == [BRANCH]


def test_an_op_within_an_op_has_one_note(backend, framework):
    inner = op_custom_gradient(lambda x: (np.exp(x), lambda upstream: upstream), name="op")
    outer = op_custom_gradient(lambda x: (inner(x), lambda upstream: upstream), name="outer")
    assert notes_of(traced(backend, outer), framework.tensor([[1.0, 2.0]])) == [ON_HOST]


def test_an_error_of_the_authors_own_has_no_note(backend, framework):
    def f(x):
        raise ValueError("must be positive")

    with pytest.raises(ValueError, match="must be positive") as caught:
        op_grad(op_custom_gradient(f))(framework.tensor(1.0))
    assert not any(" must run " in note for note in getattr(caught.value, "__notes__", ()))


def test_a_vector_in_a_matrix_product(backend, framework):
    op = op_custom_gradient(lambda a, x: (a @ x, lambda upstream: (None, upstream)), name="op")
    a, x = framework.tensor([[1.0, 2.0], [3.0, 4.0]]), framework.tensor([1.0, 2.0])
    if backend == "tensorflow":
        assert notes_of(op, a, x) == [VECTOR]
    else:
        assert tuple(op(a, x).shape) == (2,)
