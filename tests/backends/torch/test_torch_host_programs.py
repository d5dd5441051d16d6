"""The programs that inductor makes: they call the host by operations of their own, below every
derivative.
"""

import itertools

import pytest
import torch
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

from cgshim import TransformationError, op_custom_gradient, op_host

pytestmark = [pytest.mark.usefixtures("compiling"), pytest.mark.stays_in_graph]
X = torch.tensor([0.5, -1.25, 3.0])
W = torch.tensor([2.0, 5.0])
CALLS = itertools.count()


@op_host(outputs=lambda x: x)
def falling(x):
    next(CALLS)
    return x[::-1] * 3.0


@op_host(outputs=lambda x, w: x)
def weighed(x, w):
    return x * w.sum()


@op_host(outputs=lambda x, w: {"x": x, "w": w})
def both(x, w):
    return {"x": x * 2.0, "w": w * x[0]}


@op_custom_gradient
def ruled(x):
    y = falling(x)
    return y, lambda upstream: 7.0 * falling(upstream * y)


RESULTS = [
    (falling, (X,), "host_to_one", [9.0, -3.75, 1.5]),
    (weighed, (X, W), "host_to_one", [3.5, -8.75, 21.0]),
    (lambda x, w: both(x, w)["w"], (X, W), "host_to_many", [1.0, 2.5]),
]


@pytest.mark.parametrize(("f", "args", "operation", "expected"), RESULTS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_which_operation_a_program_calls(f, args, operation, expected, dynamic):
    compiled = torch.compile(lambda *args: f(*args) + 1, fullgraph=True, dynamic=dynamic)
    result, (code,) = run_and_get_code(compiled, *args)
    assert f"torch.ops.cgshim.{operation}.default(" in code
    assert result.tolist() == [y + 1 for y in expected]


def test_both_passes_of_a_rule_call_it():
    x = X.clone().requires_grad_()
    compiled = torch.compile(ruled, fullgraph=True)
    (gradient,), codes = run_and_get_code(
        lambda: torch.autograd.grad(compiled(x), x, torch.tensor([1.0, -2.0, 3.0]))
    )
    assert [code.count("cgshim.host_to_one.default(") for code in codes] == [1, 1]
    assert gradient.tolist() == [94.5, 157.5, 189.0]


def test_the_wrapper_in_c():
    """A list of results crashes it, by hand too."""
    options = {
        "cpp_wrapper": True,
        "cpp_cache_precompile_headers": False,  # they are used once
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    compiled = torch.compile(lambda *args: weighed(*args) + 1, fullgraph=True, options=options)
    assert compiled(X, W).tolist() == [4.5, -7.75, 22.0]


def test_a_tangent_is_refused():
    """torch.compile drops tangents without a word; so the graph ends here where they may be."""
    compiled = torch.compile(lambda x: falling(x) * 2, backend="aot_eager")
    assert compiled(X).tolist() == [18.0, -7.5, 3.0]
    with forward_ad.dual_level():
        assert compiled(X).tolist() == [18.0, -7.5, 3.0]
        with pytest.raises(
            TransformationError, match="falling: what runs on the host has no derivative"
        ):
            compiled(forward_ad.make_dual(X, torch.ones(3)))


def test_a_program_calls_f_for_what_is_used():
    compiled = torch.compile(lambda x: (falling(x), falling(x + 1))[0], fullgraph=True)
    compiled(X)
    before = next(CALLS)
    compiled(X)
    assert next(CALLS) == before + 2
