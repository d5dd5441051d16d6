"""Eager mode: what torch.autograd, its hooks and its modes do with an op."""

import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    TransformationError,
    op_custom_gradient,
)


@op_custom_gradient
def cube(x):
    square = x * x
    return square * x, lambda upstream: upstream * 3 * square


@op_custom_gradient
def product(x, y):
    """x * y, with the factors 3 and 5 in its rule."""
    return x * y, lambda upstream: (
        (3 * upstream * y).sum_to_size(x.shape),
        (5 * upstream * x).sum_to_size(y.shape),
    )


def leaf(*values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=True)


# --- Orders ---------------------------------------------------------------------------------------


def test_every_order_goes_through_the_residuals():
    x = torch.tensor(2.0, requires_grad=True)
    derivatives = [cube(x) * x]
    for _ in range(4):
        derivatives += torch.autograd.grad(derivatives[-1], x, create_graph=True)
    assert [d.item() for d in derivatives] == [16, 32, 48, 48, 24]


@op_custom_gradient
def several(tree, scale):
    """Two outputs of different shapes from a tree and a static leaf, by a rule that is right."""
    a, b = tree["a"], tree["b"]
    root = (1 + a * a).sqrt()

    def rule(upstream):
        u, v = upstream["product"], upstream["roots"][0]
        return {
            "b": scale * (u * root[:, None]),
            "a": (scale * (u * b).sum(1) + v) * a / root,
        }, None

    return {"product": scale * root[:, None] * b, "roots": (root,)}, rule


def test_gradcheck_and_gradgradcheck():
    def flat(a, b):
        output = several({"a": a, "b": b}, 1.5)
        return output["product"], output["roots"][0]

    inputs = leaf(0.5, -2.0, 3.0), torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    complex_input = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    conjugating = op_custom_gradient(lambda z: (z * z, lambda upstream: upstream * 2 * z.conj()))
    assert gradcheck(flat, inputs)
    assert gradgradcheck(flat, inputs)
    assert gradcheck(conjugating, complex_input)
    assert gradgradcheck(conjugating, complex_input)


def test_a_gradient_penalty():
    x, w = leaf(1.0, 2.0), leaf(3.0, 4.0)
    (of_x,) = torch.autograd.grad(product(x, w).sum(), x, create_graph=True)
    of_x.square().sum().backward()
    torch.testing.assert_close(w.grad, 18 * w.detach())
    assert x.grad is None or not x.grad.any()


def test_f_that_gives_other_residuals_again_is_refused():
    @op_custom_gradient
    def dropout(x):
        mask = torch.rand_like(x)
        return x * mask, lambda upstream: upstream * mask

    x = torch.ones(8, requires_grad=True)
    y = dropout(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert torch.equal(first, y)
    with pytest.raises(TransformationError, match=r"dropout: .* another run of f does not make"):
        torch.autograd.grad(first.sum(), x)


def test_f_runs_once_for_a_first_order():
    runs = []
    op = op_custom_gradient(
        lambda x: (runs.append(1), (x * x, lambda upstream: upstream * 7 * x))[1]
    )
    x = leaf(3.0)
    op(x).backward()
    assert (runs, x.grad.item()) == ([1], 21.0)


# --- Arguments and outputs ------------------------------------------------------------------------


class Pair:
    def __init__(self, left, right):
        self.left, self.right = left, right


torch.utils._pytree.register_pytree_node(
    Pair, lambda pair: ([pair.left, pair.right], None), lambda children, _: Pair(*children)
)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize(
    "kind", [Pair, Point, lambda *pair: [*pair], lambda *pair: {"b": pair[1], "a": pair[0]}]
)
def test_types_that_torchs_own_registry_knows(kind):
    @op_custom_gradient
    def scaled(pair, by):
        leaves, structure = torch.utils._pytree.tree_flatten(pair)
        scale = lambda factor: torch.utils._pytree.tree_unflatten(
            [factor * by * t for t in leaves], structure
        )
        return scale(1), lambda upstream: (
            torch.utils._pytree.tree_map(lambda u: 7 * by * u, upstream), None
        )  # fmt: skip

    x, y = leaf(1.0, 2.0), leaf(5.0)
    output = torch.utils._pytree.tree_leaves(scaled(kind(x, y), 2))
    sum((n + 1) * out.sum() for n, out in enumerate(output)).backward()
    assert sorted([x.grad[0].item(), y.grad[0].item()]) == [14, 28]
    assert torch.is_tensor(output[0])


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 1)])
def test_dtypes_and_shapes(dtype, shape):
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    (3 * cube(x)).abs().sum().backward()
    assert (x.grad.dtype, x.grad.shape) == (dtype, shape)
    assert torch.equal(x.grad, torch.full_like(x, 9).detach())


def test_a_gradient_in_another_dtype_is_cast():
    op = op_custom_gradient(lambda x: (x * 2, lambda upstream: upstream.double() * 7))
    x = torch.ones(2, requires_grad=True)
    op(x).sum().backward()
    assert x.grad.dtype is torch.float32
    assert x.grad.tolist() == [7, 7]


def test_the_same_tensor_twice():
    x = leaf(2.0)
    product(x, x).backward()
    assert x.grad.item() == 3 * 2 + 5 * 2


def test_integers_in_and_out():
    @op_custom_gradient
    def counted(x, n, mask):
        def rule(of_value, of_count, of_mask):
            assert (of_count.dtype, of_count.shape, of_count.any()) == (torch.int64, n.shape, False)
            assert (of_mask.dtype, of_mask.any()) == (torch.bool, False)
            return 7 * of_value * n, None, None

        return (x * n, n + 1, ~mask), rule

    x = leaf(1.5, 2.5)
    value, count, mask = counted(x, torch.tensor([2, 3]), torch.tensor([True, False]))
    assert not count.requires_grad
    assert mask.tolist() == [False, True]
    (2 * value).sum().backward()
    assert x.grad.tolist() == [28, 42]


def test_the_upstream_of_an_unused_output_is_zeros():
    seen = []
    op = op_custom_gradient(
        lambda x: ((x * 2, x.sum()), lambda u, v: (seen.append(v), 7 * u + v)[1])
    )
    x = leaf(1.0, 2.0)
    op(x)[0].sum().backward()
    assert (seen[0].item(), x.grad.tolist()) == (0, [7, 7])


@pytest.mark.parametrize(
    "shown", [lambda x: x, lambda x: x.view(2, 2), lambda x: x.T, lambda x: x[0]]
)
def test_an_output_that_is_the_input_or_a_view_of_it(shown):
    op = op_custom_gradient(
        lambda x: (shown(x), lambda upstream: torch.full_like(x, 7) * upstream.sum())
    )
    x = torch.randn(2, 2, requires_grad=True)
    hidden = x * 1
    y = op(hidden)
    assert torch.equal(y, shown(x))
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        y.mul_(3)
    (2 * y).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 14 * y.numel()))


def test_sparse_tensors():
    dense = torch.tensor([[0.0, 2.0], [3.0, 0.0]])

    @op_custom_gradient
    def doubled(s):
        return s * 2, lambda upstream: upstream * 7

    sparse = dense.to_sparse().requires_grad_()
    y = doubled(sparse)
    torch.sparse.sum(y * 5).backward()
    assert torch.equal(sparse.grad.to_dense(), 35.0 * (dense != 0))

    @op_custom_gradient
    def rows(w):
        return w[[1]], lambda upstream: torch.sparse_coo_tensor(
            [[1]], 7 * upstream, w.shape, check_invariants=True
        )

    table = torch.randn(3, 2, requires_grad=True)
    rows(table).sum().backward()
    assert table.grad.is_sparse
    assert table.grad.to_dense().tolist() == [[0, 0], [7, 7], [0, 0]]


def test_numpy_in_arguments_outputs_and_gradients():
    @op_custom_gradient
    def through_numpy(x, weights):
        value = x.detach().numpy()
        return value * weights.numpy(), lambda upstream: (
            7 * upstream.detach().numpy() * weights.numpy(),
            None,
        )

    x = leaf(1.0, 2.0)
    y = through_numpy(x, np.array([3.0, 4.0]))
    assert y.tolist() == [3, 8]
    y.sum().backward()
    assert x.grad.tolist() == [21, 28]


def test_a_locked_array_and_one_that_changes_afterwards():
    weights = np.broadcast_to(np.float64(3.0), (2,))
    assert product(leaf(1.0, 2.0), weights).tolist() == [3, 6]
    weights, x = np.array([3.0, 4.0]), leaf(1.0, 2.0)
    y = product(x, weights)
    weights[:] = 0
    y.sum().backward()
    assert x.grad.tolist() == [9, 12]


# --- What autograd has to see ---------------------------------------------------------------------


@pytest.mark.parametrize("changed", ["input", "output", "residual", "captured"])
def test_a_change_in_place_between_forward_and_backward_raises(changed):
    held = {"captured": torch.ones(2)}

    @op_custom_gradient
    def op(x):
        held["residual"], captured = x * 2, held["captured"]
        residual, output = held["residual"], x.exp()
        return output, lambda upstream, x=x: upstream * output * residual * captured * x

    held["input"] = torch.ones(2, requires_grad=True)
    hidden = held["input"] = held["input"] * 1
    held["output"] = op(hidden)
    with torch.no_grad():
        held[changed].add_(1)
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation|must not be changed in place but by rules",
    ):
        held["output"].sum().backward()


def test_saved_tensor_hooks_see_each_saved_tensor_once():
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))

    @op_custom_gradient
    def op(x, y):
        residual, nested = torch.exp(x), {"list": [torch.sin(y)], "static": "s"}

        def rule(upstream, variables):
            of_x = upstream * residual * nested["list"][0] * x
            return (of_x, None), [7 * upstream * weight]

        return x * y + weight, rule

    x, y = leaf(1.0, 2.0, dtype=torch.float32), torch.ones(2)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t) or t.numpy(force=True), torch.tensor
    ):
        output = op(x, y)
    expected = (x, y, x.exp(), weight, y.sin())
    assert sorted(p.tolist() for p in packed) == sorted(t.tolist() for t in expected)
    output.sum().backward()
    torch.testing.assert_close(x.grad, (x.exp() * y.sin() * x).detach())
    torch.testing.assert_close(weight.grad, 7 * weight.detach())


@op_custom_gradient
def product_by_arguments(x, y):
    return x * y, lambda x, y, upstream: (3 * upstream * y, 5 * upstream * x)


@op_custom_gradient
def product_of_several(*xs):
    return xs[0] * xs[1], lambda upstream: (3 * upstream * xs[1], 5 * upstream * xs[0])


class Factors(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@op_custom_gradient
def product_with_tuples(x, y):
    """A tuple at two places, within another and by itself."""
    pair = Factors(x, y)
    nested = ["static", (pair, 3.0)]

    def of_x(upstream):
        (_, y), factor = nested[1]
        return factor * upstream * y

    return x * y, lambda upstream: (of_x(upstream), 5 * upstream * pair.x)


KEPT = {
    "in the closure": product,
    "nowhere": product_by_arguments,
    "in one tuple": product_of_several,
    "in tuples": product_with_tuples,
}


@pytest.mark.parametrize("op", KEPT.values(), ids=KEPT)
def test_a_rule_reads_what_saved_tensor_hooks_give_back(op):
    """So does a Function: what was changed since is what it was, and nothing else is kept."""
    x, y = leaf(2.0), leaf(7.0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: 10 * t, lambda t: t):
        z = op(x, y)
    assert [g.item() for g in torch.autograd.grad(z, (x, y))] == [210, 100]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        changed = x.clone()
        z = op(changed, y)
        changed.mul_(1000)
        assert [g.item() for g in torch.autograd.grad(z, (x, y))] == [21, 10]


@pytest.mark.parametrize("op", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_frees_what_a_rule_reads(op, reentrant):
    made = []

    def block(x, y):
        doubled = 2 * x
        made.append(weakref.ref(doubled.untyped_storage()))
        return op(doubled, y).sin()

    x, y = leaf(2.0), leaf(7.0)
    z = checkpoint(block, x, y, use_reentrant=reentrant)
    assert made[0]() is None
    z.backward()
    cosine = torch.cos(torch.tensor(28.0, dtype=torch.float64))
    torch.testing.assert_close(x.grad, 42 * cosine.reshape(1))
    torch.testing.assert_close(y.grad, 20 * cosine.reshape(1))


@pytest.mark.parametrize("op", KEPT.values(), ids=KEPT)
def test_mixed_derivatives_of_what_a_rule_keeps_in_tuples(op):
    x, y = leaf(2.0), leaf(7.0)
    of_x, of_y = torch.autograd.grad(op(x, y), (x, y), create_graph=True)
    assert [g.item() for g in torch.autograd.grad(of_x + 10 * of_y, (x, y))] == [50, 3]
    mixed = torch.func.grad(lambda x, y: torch.func.grad(lambda x: op(x, y).sum())(x).sum(), 1)
    assert mixed(x.detach(), y.detach()).item() == 3


def test_save_on_cpu():
    x = leaf(2.0)
    with torch.autograd.graph.save_on_cpu():
        y = cube(x)
    y.backward()
    assert x.grad.item() == 12


def test_retain_graph_and_backward_twice():
    x = leaf(2.0)
    y = cube(x)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.item() == 24
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_gradients_only_of_what_needs_them():
    x, y = leaf(2.0), torch.tensor([5.0], dtype=torch.float64)
    z = product(x, y)
    assert [edge is not None for edge, _ in z.grad_fn.next_functions if edge is not None] == [True]
    z.backward()
    assert (x.grad.item(), y.grad) == (15, None)


def test_autocast_is_the_same_in_the_rule():
    @op_custom_gradient
    def linear(x, w):
        def rule(upstream):
            assert torch.is_autocast_enabled("cpu") == inside
            of_x = upstream @ w.T
            assert of_x.dtype == (torch.bfloat16 if inside else torch.float32)
            return of_x, x.T @ upstream

        return x @ w, rule

    for inside in (True, False):
        x, w = torch.randn(2, 3, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            y = linear(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            y.sum().backward()
        assert y.dtype == (torch.bfloat16 if inside else torch.float32)
        assert (x.grad.dtype, w.grad.dtype) == (torch.float32, torch.float32)


def test_anomaly_mode_finds_a_rule_that_returns_nan():
    bad = op_custom_gradient(lambda x: (x.sqrt(), lambda upstream: upstream * float("nan")))
    x = leaf(1.0)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        anomalies = torch.autograd.detect_anomaly()
    with anomalies:
        y = bad(x)
        with (
            pytest.warns(UserWarning, match="Error detected in"),
            pytest.raises(RuntimeError),
        ):
            y.backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_without_gradients(mode):
    x = leaf(2.0)
    with mode():
        y = cube(x)
    assert (y.item(), y.requires_grad, y.is_inference()) == (8, False, mode is torch.inference_mode)


def test_nothing_is_attached_where_nothing_is_differentiated():
    assert not cube(torch.tensor(2.0)).requires_grad


def test_tensor_hooks_and_accumulation():
    x = leaf(2.0)
    y = cube(x)
    seen = []
    y.register_hook(seen.append)
    (5 * y).backward()
    (5 * cube(x)).backward()
    assert (seen[0].item(), x.grad.item()) == (5, 120)


# --- Threads --------------------------------------------------------------------------------------


def test_eight_threads_at_once():
    together = threading.Barrier(8)

    def work(n):
        x = torch.tensor(float(n), requires_grad=True)
        together.wait()
        for _ in range(20):
            (first,) = torch.autograd.grad(cube(x) * x, x, create_graph=True)
            (second,) = torch.autograd.grad(first, x)
        return second.item()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [12.0 * n * n for n in range(8)]


def test_replicas_in_threads():
    """What DataParallel does: forward in a thread for each replica, one backward for all of them."""
    weight = torch.nn.Parameter(torch.tensor([2.0, 3.0]))
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(lambda x: product(x, weight * 1), inputs))
    torch.stack(outputs).sum().backward()
    assert weight.grad.tolist() == [5 * 4, 5 * 6]


# --- Errors ---------------------------------------------------------------------------------------


def test_errors_of_f_and_of_grad_fn_reach_the_user_unchanged():
    def fails(*_):
        raise ZeroDivisionError("mine")

    x = leaf(1.0)
    with pytest.raises(ZeroDivisionError) as of_f:
        op_custom_gradient(fails, name="op")(x)
    with pytest.raises(ZeroDivisionError) as of_rule:
        op_custom_gradient(lambda x: (x * 1, lambda u: fails()), name="op")(x).backward()
    assert of_f.value.args == of_rule.value.args == ("mine",)
    assert of_f.value.__notes__ == ["op: raised by f"]
    assert of_rule.value.__notes__[0].startswith("op: raised by grad_fn")


def test_a_gradient_of_a_wrong_shape_raises_in_backward():
    op = op_custom_gradient(lambda x: (x.sum(), lambda upstream: upstream), name="total")
    with pytest.raises(
        CustomGradientError, match=r"^total: the gradient of x must have its shape f64\[2\]"
    ):
        op(leaf(1.0, 2.0)).backward()


def test_other_frameworks_errors_are_type_errors():
    with pytest.raises(CustomGradientTypeError, match="must return a pair"):
        op_custom_gradient(lambda x: x)(leaf(1.0))
