"""What counts as the same tensor in two runs of f: the tensors that others are made of are compared
too.
"""

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from cgshim_torch._eager.second_order import agree

X = torch.tensor([[0.5, 0.0, -2.0], [3.0, 0.25, 0.0]])


class Named(torch.Tensor):
    """A subclass that adds nothing."""


KINDS = {
    "plain": lambda x: x,
    "float16": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float8": lambda x: x.to(torch.float8_e5m2),
    "complex": lambda x: torch.complex(x, 2 * x),
    "integers": lambda x: (4 * x).int(),
    "not contiguous": lambda x: x.T,
    "lazily conjugated": lambda x: torch.complex(x, 2 * x).conj(),
    "a subclass": lambda x: x.as_subclass(Named),
    "two tensors": lambda x: TwoTensor(X, x),
    "sparse": lambda x: x.to_sparse(),
    "compressed rows": lambda x: x.to_sparse_csr(),
    "compressed columns": lambda x: x.to_sparse_csc(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.125, 0, torch.qint8),
    "another memory": lambda x: x.to_mkldnn(),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*nested:UserWarning", "ignore:.*[Ss]parse:UserWarning",
                                        "ignore:.*quantiz:UserWarning")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_the_same_and_another_one(kind):
    assert agree(kind(X), kind(X.clone()))
    other = X.clone()
    other[1, 0] = 4.0
    assert not agree(kind(X), kind(other))


def test_an_ulp_is_the_order_of_sums():
    ulp = 1 + torch.finfo(torch.float32).eps
    assert agree(X, X * ulp)
    assert not agree(X, X * (1 + 3e-6))
    assert not agree(X.double(), X.double() * (1 + 1e-9))
    assert not agree(1e-20 * X, 2e-20 * X)


def test_numbers_that_are_none():
    special = torch.tensor([float("nan"), float("inf"), 0.0])
    assert agree(special, special.clone())
    assert not agree(special, special.neg())
    assert not agree(special, special.nan_to_num())


def test_another_kind_is_not_the_same():
    for other in (X.double(), X[:1], X.to_sparse(), X.as_subclass(Named), X.to("meta")):
        assert not agree(X, other)


def test_what_has_no_values_cannot_differ():
    assert agree(X.to("meta"), X.to("meta"))


class Opaque(torch.Tensor):
    """A wrapper that tells nothing of what it wraps."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return Opaque(X) if func is torch.ops.aten.detach.default else NotImplemented


def test_what_cannot_be_compared_is_not_known_to_be_the_same():
    assert not agree(Opaque(X), Opaque(X))
