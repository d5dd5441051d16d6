"""op_custom_gradient(vmap=rule): beside a custom_vjp whose two halves are each a custom_vmap.

The kernel's rules are wrong on purpose, by other factors than autodiff's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cgshim import TransformationError, op_custom_gradient
from cgshim.testing import check_gradients

X = jnp.arange(6.0).reshape(2, 3) + 1
W = jnp.array([2.0, -3.0])
U = jnp.array([1.0, 2.0, -3.0])
vmap, grad = jax.vmap, jax.grad


class Kernel:
    """x * x * w of a vector and a number, without batching; it counts what runs."""

    def __init__(self, **options):
        self.batches = []
        self.op = op_custom_gradient(self.one, vmap=self.many, name="kernel", **options)

    def one(self, x, w):
        return x * x * w, lambda u: (7.0 * u * 2 * x * w, 11.0 * (u * x * x).sum())

    def many(self, size, in_batched, x, w):
        self.batches.append((size, in_batched))
        x_is, w_is = in_batched
        xs, ws = x if x_is else x[None], (w if w_is else w[None])[:, None]

        def grad(u):
            of_x, of_w = 7.0 * u * 2 * xs * ws, 11.0 * (u * xs * xs).sum(-1)
            return of_x if x_is else of_x.sum(0), of_w if w_is else of_w.sum(0)

        return xs * xs * ws, grad, True


def by_hand(order):
    """The same with JAX's own two, as its documentation has them.

    JAX refuses the reverse mode of a custom_vmap, and so a second order of this: there the twin has
    none, and vmap maps it.
    """

    @jax.custom_vjp
    def f(x, w):
        return forward(x, w)

    @(jax.custom_batching.custom_vmap if order == 1 else lambda f: f)
    def forward(x, w):
        return x * x * w

    @(forward.def_vmap if order == 1 else lambda f: f)
    def forward_rule(size, in_batched, x, w):
        x = x if in_batched[0] else x[None]
        w = w if in_batched[1] else w[None]
        return x * x * w[:, None], True

    f.defvjp(
        lambda x, w: (forward(x, w), (x, w)),
        lambda kept, u: (7.0 * u * 2 * kept[0] * kept[1], 11.0 * (u * kept[0] ** 2).sum()),
    )
    return f


def weighted(f):
    return lambda x, w: (f(x, w) * U).sum()


def squared(tree):
    return sum((x * x).sum() for x in jax.tree.leaves(tree))


PROGRAMS = {
    "vmap": lambda f, ax: vmap(f, ax),
    "jit of vmap": lambda f, ax: jax.jit(vmap(f, ax)),
    "vmap of jit": lambda f, ax: vmap(jax.jit(f), ax),
    "vmap of grad": lambda f, ax: vmap(grad(weighted(f), (0, 1)), ax),
    "vmap of jit of grad": lambda f, ax: vmap(jax.jit(grad(weighted(f), (0, 1))), ax),
    "vmap of grad of jit": lambda f, ax: vmap(grad(jax.jit(weighted(f)), (0, 1)), ax),
    "jit of vmap of grad": lambda f, ax: jax.jit(vmap(grad(weighted(f), (0, 1)), ax)),
    "grad of vmap": lambda f, ax: grad(lambda x, w: squared(vmap(f, ax)(x, w)), (0, 1)),
    "grad of vmap of jit": lambda f, ax: grad(
        lambda x, w: squared(vmap(jax.jit(f), ax)(x, w)), (0, 1)
    ),
    "jit of grad of vmap": lambda f, ax: jax.jit(
        grad(lambda x, w: squared(vmap(f, ax)(x, w)), (0, 1))
    ),
    "grad of vmap of grad": lambda f, ax: grad(
        lambda x, w: squared(vmap(grad(weighted(f), (0, 1)), ax)(x, w)), (0, 1)
    ),
    "vmap of grad of grad": lambda f, ax: vmap(
        grad(lambda x, w: squared(grad(weighted(f), (0, 1))(x, w)), (0, 1)), ax
    ),
    "vmap of three orders": lambda f, ax: vmap(
        grad(lambda x, w: squared(grad(lambda x, w: squared(grad(weighted(f))(x, w)))(x, w))), ax
    ),
    "grad of grad of vmap": lambda f, ax: grad(
        lambda x, w: squared(grad(lambda x, w: (vmap(f, ax)(x, w) * U).sum(), (0, 1))(x, w)), (0, 1)
    ),
    "jacrev of vmap": lambda f, ax: jax.jacrev(vmap(f, ax), (0, 1)),
    "vmap of jacrev": lambda f, ax: vmap(jax.jacrev(f, (0, 1)), ax),
    "vmap of jacrev of jacrev": lambda f, ax: vmap(jax.jacrev(jax.jacrev(f)), ax),
    "vmap of grad of a scan": lambda f, ax: vmap(
        grad(lambda x, w: jax.lax.scan(lambda c, _: (f(c, w) / 9, None), x, None, 3)[0].sum()), ax
    ),
    "vmap of grad of checkpoint": lambda f, ax: vmap(grad(jax.checkpoint(weighted(f))), ax),
    "vmap of vmap": lambda f, ax: lambda x, w: vmap(lambda s: vmap(f, ax)(s * x, w))(U),
    "vmap of vmap of grad": lambda f, ax: (
        lambda x, w: vmap(lambda s: vmap(grad(weighted(f), (0, 1)), ax)(s * x, w))(U)
    ),
    "vmap of grad of vmap": lambda f, ax: (
        lambda x, w: vmap(
            lambda s: grad(lambda x, w: squared(vmap(f, ax)(s * x, w)), (0, 1))(x, w)
        )(U)
    ),
}
HIGHER = [name for name in PROGRAMS if name.count("grad") + name.count("jacrev") > 1] + [
    "vmap of three orders",
    "vmap of grad of checkpoint",
]
BATCHED = {"both": ((0, 0), X, W), "x": ((0, None), X, W[0]), "w": ((None, 0), X[0], W)}


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_by_hand(program, batched):
    axes, x, w = BATCHED[batched]
    kernel = Kernel()
    found = PROGRAMS[program](kernel.op, axes)(x, w)
    expected = jax.jit(PROGRAMS[program](by_hand(2 if program in HIGHER else 1), axes))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), found, expected)
    assert kernel.batches


FORWARD = {
    "jvp of vmap": lambda f, ax: lambda x, w: jax.jvp(vmap(f, ax), (x, w), (x, w)),
    "vmap of jvp": lambda f, ax: vmap(lambda x, w: jax.jvp(f, (x, w), (x, w)), ax),
    "vmap of hessian": lambda f, ax: vmap(jax.hessian(weighted(f), (0, 1)), ax),
    "hessian of vmap": lambda f, ax: jax.hessian(lambda x, w: squared(vmap(f, ax)(x, w))),
    "jit of vmap of jacfwd": lambda f, ax: jax.jit(vmap(jax.jacfwd(f), ax)),
}


@pytest.mark.parametrize("batched", BATCHED)
@pytest.mark.parametrize("program", FORWARD)
def test_forward_mode_where_it_is_promised(program, batched):
    """As the op without a rule for batches: no function by hand has both modes."""
    axes, x, w = BATCHED[batched]
    plain = op_custom_gradient(Kernel().one, forward_mode=True)
    found = FORWARD[program](Kernel(forward_mode=True).op, axes)(x, w)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5),
        found,
        jax.jit(FORWARD[program](plain, axes))(x, w),
    )


def test_forward_mode_that_is_not_promised_is_refused():
    for program in ("jvp of vmap", "vmap of jvp"):
        with pytest.raises(
            TransformationError, match=r"^kernel: forward mode needs a rule that is"
        ):
            FORWARD[program](Kernel().op, (0, 0))(X, W)


def test_the_rule_runs_once_for_a_batch_and_its_gradient():
    kernel = Kernel()
    PROGRAMS["grad of vmap"](kernel.op, (0, None))(X, W[0])
    assert kernel.batches == [(2, (True, False))]


def test_batching_rule_of_gradients_by_unbatched_arguments():
    kernel = Kernel()
    PROGRAMS["vmap of grad"](kernel.op, (0, None))(X, W[0])
    assert kernel.batches == [(2, (True, False)), (2, (True, True))]
    kernel = Kernel()
    vmap(grad(weighted(kernel.op)), (0, None))(X, W[0])  # x alone
    assert kernel.batches == [(2, (True, False))] * 2


def test_an_outer_vmap_maps_what_the_rule_does():
    kernel = Kernel()
    PROGRAMS["vmap of vmap"](kernel.op, (0, 0))(X, W)
    assert kernel.batches == [(2, (True, True))]


def test_trees_static_arguments_options_and_integers():
    def many(size, in_batched, pair, kind, table, *, scale):
        assert in_batched == ({"a": True, "b": False}, None, False)
        assert kind == "sum"
        y = scale * pair["a"] * pair["b"] + table.sum()

        def rule(u):
            return (
                {"a": scale * 5 * u["y"] * pair["b"], "b": 3 * (u["y"] * pair["a"]).sum(0)},
                None,
                None,
            )

        return {"y": y, "n": table}, rule, {"y": True, "n": False}

    @op_custom_gradient(vmap=many)
    def op(pair, kind, table, *, scale):
        rule = lambda u: (
            {"a": 5 * scale * u["y"] * pair["b"], "b": 3 * u["y"] * pair["a"]},
            None,
            None,
        )
        return {"y": scale * pair["a"] * pair["b"] + table.sum(), "n": table}, rule

    table = jnp.arange(3)
    of_one = lambda a, b: op({"a": a, "b": b}, "sum", table, scale=2.0)
    found = vmap(of_one, (0, None), out_axes={"y": 0, "n": None})(X, U)
    np.testing.assert_array_equal(found["y"], 2 * X * U + 3)
    np.testing.assert_array_equal(found["n"], table)
    total = lambda a, b: vmap(lambda a: of_one(a, b)["y"])(a).sum()
    of_a, of_b = grad(total, (0, 1))(X, U)
    np.testing.assert_array_equal(of_a, 10 * jnp.broadcast_to(U, X.shape))
    np.testing.assert_array_equal(of_b, 3 * X.sum(0))
    each = vmap(grad(lambda a: of_one(a, U)["y"].sum()))(X)
    np.testing.assert_array_equal(each, of_a)


def test_complex_numbers_and_methods():
    class Solver:
        scale = 2.0

        def many(self, size, in_batched, z):
            return self.scale * z * z, lambda u: 14 * u * jnp.conj(z), True

        @op_custom_gradient(vmap=many)
        def op(self, z):
            return self.scale * z * z, lambda u: 14 * u * jnp.conj(z)

    z = jnp.array([1.0 + 2.0j, -0.5j])
    loss = lambda f: lambda z: jnp.real(f(z) * (1 + 3j))
    plain = lambda z: Solver.op.held_function.held_function(Solver(), z)
    expected = vmap(grad(loss(op_custom_gradient(plain))))(z)
    solver = Solver()
    np.testing.assert_allclose(vmap(grad(loss(solver.op)))(z), expected)
    np.testing.assert_allclose(jax.jit(vmap(grad(loss(solver.op))))(z), expected)
    np.testing.assert_allclose(grad(lambda z: vmap(loss(solver.op))(z).sum())(z), expected)


def test_a_captured_tensor_of_compiled_code_raises():
    def program(x, w):
        op = op_custom_gradient(
            lambda x: (x * w, lambda u: u * w),
            vmap=lambda size, in_batched, x: (x * w, lambda u: u * w, True),
            name="scale",
        )
        return op(x)

    with pytest.raises(TypeError, match="Tracer"):  # JAX's own: its custom_vmap takes no closures
        vmap(jax.jit(program), (0, None))(X, W[0])


@pytest.mark.parametrize(
    "program", ["vmap", "vmap of grad", "grad of vmap", "vmap of three orders"]
)
def test_a_captured_tensor_of_a_vmap_raises(program):
    def of_two(x, w):
        op = op_custom_gradient(
            lambda x: (2 * x, lambda u: 2 * u),
            vmap=lambda size, in_batched, x: (w * x, lambda u: w * u, True),
            name="scale",
        )
        return op(x)

    mapped = PROGRAMS[program](lambda x, w: of_two(x, jax.lax.stop_gradient(w)), (0, 0))
    with pytest.raises(jax.errors.UnexpectedTracerError):
        mapped(X, W)


def test_check_gradients_maps_it():
    check_gradients(op_custom_gradient(lambda x: (x * x, lambda u: 2 * u * x),
                                       vmap=lambda size, in_batched, x: (x * x, lambda u: 2 * u * x, True)),
                    [X])  # fmt: skip


# --- From JAX's documentation ---------------------------------------------------------------------


def test_easy_scale_of_the_documentation():
    """jax.custom_batching.custom_vmap, its first example: the rule has what vmap has not."""
    called = []

    def easy_scale_rule(axis_size, in_batched, x, s):
        called.append(axis_size)
        x_is, s_is = in_batched
        y = x * s if not (x_is and s_is) else x * s[:, None]

        def rule(u):
            of_x = u * (s[:, None] if s_is else s)
            of_s = (u * x).sum(-1) if s_is else (u * x).sum()
            return of_x if x_is else of_x.sum(0), of_s

        return y, rule, True

    easy = op_custom_gradient(
        lambda x, s: (x * s, lambda u: (u * s, (u * x).sum())), vmap=easy_scale_rule
    )
    np.testing.assert_array_equal(vmap(easy)(X, W), X * W[:, None])
    np.testing.assert_array_equal(vmap(easy, (0, None))(X, W[0]), X * W[0])
    np.testing.assert_array_equal(grad(lambda s: vmap(easy, (0, None))(X, s).sum())(W[0]), X.sum())
    assert called == [2, 2, 2]


def test_matvec_of_the_documentation():
    """A batch of vectors is one product of matrices; any other batch is vmap's own."""
    products = []

    def matvec_rule(axis_size, in_batched, a, x):
        a_is, x_is = in_batched
        products.append("matvecs" if a_is else "matmul")
        if not a_is:
            return x @ a.T, lambda u: (u.T @ x, u @ a), True
        x = x if x_is else jnp.broadcast_to(x, (axis_size, *x.shape))
        y, pullback = jax.vjp(vmap(jnp.dot), a, x)

        def rule(u):
            of_a, of_x = pullback(u)
            return of_a, of_x if x_is else of_x.sum(0)

        return y, rule, True

    matvec = op_custom_gradient(
        lambda a, x: (a @ x, lambda u: (jnp.outer(u, x), u @ a)), vmap=matvec_rule
    )
    a, xs = jnp.array([[1.0, 2.0, 3.0], [5.0, 7.0, -11.0]]), X
    np.testing.assert_array_equal(vmap(matvec, (None, 0))(a, xs), xs @ a.T)
    total = lambda f: lambda a, x: (vmap(f, (None, 0))(a, x) ** 2).sum()
    for found, expected in zip(
        grad(total(matvec), (0, 1))(a, xs), grad(total(jnp.dot), (0, 1))(a, xs), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert products == ["matmul", "matmul"]
    check_gradients(matvec, [a, xs[0]])
