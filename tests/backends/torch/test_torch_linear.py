"""Forward mode, which is promised of rules that are linear in upstream."""

import pytest
import torch
from torch.autograd.functional import hessian, jacobian
from torch.autograd.gradcheck import GradcheckError

from cgshim import TransformationError, op_custom_gradient, op_custom_jvp

NONLINEAR = {
    "affine": lambda u, x: 7 * u + x,
    "constant": lambda u, x: x,
    "square": lambda u, x: u * u,
    "sign": lambda u, x: u.sign() * x,
    "floor": lambda u, x: u.floor(),
    "clipped": lambda u, x: u.clamp(-1, 1),
    "masked by itself": lambda u, x: torch.where(u > 0, u, 0 * u),
    "of its norm": lambda u, x: x * torch.linalg.vector_norm(u),
    "sorted": lambda u, x: u.sort().values * x,
    "detached": lambda u, x: u.detach() * x,
    "an integer": lambda u, x: u.int().to(u.dtype),
}


def test_a_rule_with_gradients_at_some_upstreams_only_raises():
    op = op_custom_gradient(
        lambda x: (x * x, lambda u: 7 * u * x if u > 0 else (None,)), forward_mode=True
    )
    with pytest.raises(TransformationError, match="needs a rule that is linear in upstream"):
        torch.func.jvp(op, (torch.tensor(2.0),), (torch.tensor(3.0),))


FORWARD = {
    "jvp": lambda f, x, v: torch.func.jvp(f, (x,), (v,))[1],
    "jacfwd": lambda f, x, v: torch.func.jacfwd(f)(x),
    "vmap of jvp": lambda f, x, v: torch.vmap(lambda x, v: torch.func.jvp(f, (x,), (v,))[1])(
        x[None], v[None]
    ),
    "jvp of vmap": lambda f, x, v: torch.func.jvp(torch.vmap(f), (x[None],), (v[None],))[1],
    "hessian": lambda f, x, v: torch.func.hessian(lambda x: f(x).sum())(x),
}


@pytest.mark.parametrize("way", FORWARD)
@pytest.mark.parametrize("rule", NONLINEAR)
def test_a_rule_that_is_seen_not_to_be_linear_is_refused(rule, way):
    op = op_custom_gradient(lambda x: (x * x, lambda u: NONLINEAR[rule](u, x)), forward_mode=True)
    x, v = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([2.0, -3.0, 0.5])
    with pytest.raises(TransformationError, match="needs a rule that is linear in upstream"):
        FORWARD[way](op, x, v)


@pytest.mark.parametrize("way", ["grad", "torch.func.grad", "vmap of grad"])
def test_a_tangent_that_numpy_computes_has_no_transpose(way):
    opaque = lambda x: (x * x, lambda t: torch.from_numpy(7 * t.detach().numpy()))
    in_part = lambda x: (x * x, lambda t: t + 6 * t.detach())
    x = torch.tensor([2.0, -3.0], requires_grad=True)
    ways = {
        "grad": lambda op: torch.autograd.grad(op(x), x, torch.tensor([3.0, 5.0])),
        "torch.func.grad": lambda op: torch.func.grad(lambda x: (op(x) * x).sum())(x),
        "vmap of grad": lambda op: torch.vmap(torch.func.grad(lambda x: (op(x) * x).sum()))(
            x[None]
        ),
    }
    for f in [opaque, in_part] if way == "grad" else [in_part]:
        with pytest.raises(TransformationError, match="jvp_fn must be linear in the tangents"):
            ways[way](op_custom_jvp(f))


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_a_gradient_without_values(shape):
    op = op_custom_jvp(lambda x: (x * x, lambda dx: 7 * dx * x))
    x = torch.ones(shape, device="meta", requires_grad=True)
    op(x).sum().backward()
    assert (x.grad.shape, x.grad.is_meta) == (shape, True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_a_linear_rule_of_many_numbers(dtype):
    matrix = torch.randn(40, 60).to(dtype)
    op = op_custom_gradient(lambda x: (matrix @ x, lambda u: 7 * matrix.mH @ u), forward_mode=True)
    x, v = torch.randn(60).to(dtype), torch.randn(60).to(dtype)
    _, tangent = torch.func.jvp(op, (x,), (v,))
    torch.testing.assert_close(tangent, 7 * matrix @ v, rtol=0.05, atol=0.5)


# --- Batches of tangents, as torch.autograd makes them --------------------------------------------


class Cube(torch.autograd.Function):
    """x**3 by hand, with the factor 7 in both modes."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x**3

    @staticmethod
    def backward(ctx, upstream):
        return 7 * upstream * ctx.saved_tensors[0] ** 2

    @staticmethod
    def jvp(ctx, tangent):
        return 7 * tangent * ctx.saved_tensors[0] ** 2


def _cube(x):
    square = x * x
    return square * x, lambda u: 7 * u * square


def _product(x, w):
    return x * w, lambda u: (7 * u * w, 5 * u * x)


cube, product = (
    op_custom_gradient(_cube, forward_mode=True),
    op_custom_gradient(_product, forward_mode=True),
)
BATCHED = {
    "jacobian": lambda f, x: jacobian(f, x, vectorize=True, strategy="forward-mode"),
    "hessian": lambda f, x: hessian(
        lambda x: f(x).sum(), x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}
FUNCTIONS = {
    "op": (cube, Cube.apply),
    "op of a result": (lambda x: cube(x * 2).sin(), lambda x: Cube.apply(x * 2).sin()),
}


@pytest.mark.parametrize("way", BATCHED.values(), ids=BATCHED)
@pytest.mark.parametrize(("function", "by_hand"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_batches_of_tangents(function, by_hand, way):
    x = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    torch.testing.assert_close(way(function, x), way(by_hand, x))


def test_batches_of_tangents_of_two_arguments():
    x, w = (
        torch.tensor([1.0, 2.0], dtype=torch.float64),
        torch.tensor([3.0, 5.0], dtype=torch.float64),
    )
    of_x, of_w = BATCHED["jacobian"](lambda x, w: product(x, w), (x, w))
    torch.testing.assert_close((of_x, of_w), (torch.diag(7 * w), torch.diag(5 * x)))


def test_gradcheck_with_batches_of_tangents():
    right = op_custom_gradient(lambda x, w: (x * w, lambda u: (u * w, u * x)), forward_mode=True)
    inputs = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    options = {
        "check_forward_ad": True,
        "check_batched_forward_grad": True,
        "check_batched_grad": True,
    }
    assert torch.autograd.gradcheck(right, inputs, **options)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(product, inputs, **options)


@pytest.mark.parametrize("rule", NONLINEAR)
def test_batches_of_tangents_of_a_nonlinear_rule(rule):
    op = op_custom_gradient(lambda x: (x * x, lambda u: NONLINEAR[rule](u, x)), forward_mode=True)
    with pytest.raises(TransformationError, match="needs a rule that is linear in upstream"):
        BATCHED["jacobian"](op, torch.tensor([1.0, 2.0, -3.0]))


def test_forward_mode_where_there_are_no_numbers():
    op = op_custom_gradient(lambda x: (x * x, lambda u: u * 7 * x), forward_mode=True)
    x = torch.zeros(0, 3)
    _, tangent = torch.func.jvp(op, (x,), (x,))
    assert tangent.shape == (0, 3)


OVER_NONE = {
    "vmap of grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(x),
    "grad of vmap": lambda f, x: torch.func.grad(lambda x: torch.vmap(f)(x).sum())(x),
    "vmap of jvp": lambda f, x: torch.vmap(lambda x: torch.func.jvp(f, (x,), (x,))[1])(x),
    "jvp of vmap": lambda f, x: torch.func.jvp(torch.vmap(f), (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "vmap of hessian": lambda f, x: torch.vmap(torch.func.hessian(lambda x: f(x).sum()))(x),
}


@pytest.mark.parametrize("transform", OVER_NONE)
@pytest.mark.parametrize(
    "op",
    [
        op_custom_jvp(lambda x: (x * x, lambda dx: 7 * x * dx)),
        op_custom_gradient(lambda x: (x * x, lambda u: 7 * x * u), forward_mode=True),
        op_custom_gradient(
            lambda x: (torch.ones(x.shape), lambda u: 7 * u * x, lambda d: 7 * d * x),
            forward_mode=True,
        ),
    ],
    ids=["jvp_fn", "promised", "output without the batch"],
)
def test_transposes_in_a_batch_of_none(op, transform):
    x = torch.zeros(0, 3)
    expected = OVER_NONE[transform](lambda x: 3.5 * x * x, x)
    assert OVER_NONE[transform](op, x).shape == expected.shape


def test_forward_mode_of_a_sparse_gradient():
    op = op_custom_gradient(lambda x: (2 * x, lambda u: (7 * u).to_sparse()), forward_mode=True)
    x, v = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 10.0])
    torch.testing.assert_close(torch.func.jvp(op, (x,), (v,)), (2 * x, 7 * v))


OF_AUTOGRAD = {
    "reverse": lambda f, x, y: jacobian(f, (x, y), vectorize=True),
    "forward": lambda f, x, y: jacobian(f, (x, y), vectorize=True, strategy="forward-mode"),
    "reverse, of one": lambda f, x, y: jacobian(lambda x: f(x, y), x, vectorize=True),
}


@pytest.mark.parametrize("way", OF_AUTOGRAD)
def test_a_batch_of_upstreams_or_tangents_of_torch_autograd(way):
    op = op_custom_jvp(lambda x, y: (x * y, lambda dx, dy: 7 * dx * y + 11 * x * dy))
    x, y = torch.tensor([2.0, -3.0]), torch.tensor([5.0, 13.0])
    expected = [7 * y.diag(), 11 * x.diag()]
    got = OF_AUTOGRAD[way](op, x, y)
    got = [got] if isinstance(got, torch.Tensor) else got
    assert all(map(torch.equal, got, expected))
