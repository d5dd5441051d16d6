"""Host functions in every transformation of JAX, how often they run, and what they leave behind."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from jax_ops import enable_x64, printed_on_devices

import cgshim
from cgshim import (
    CustomGradientTypeError,
    CustomGradientValueError,
    Spec,
    TransformationError,
    op_custom_gradient,
    op_host as make_host,
)
from cgshim_jax import host_function

X = np.array([0.5, -2.0, 3.0])
W = np.array(10.0)


def weighted(x, w):
    """Told from its own gradient, and from itself with its arguments swapped."""
    return np.cumsum(x, -1) * w


class Counted:
    """A function of NumPy arrays that counts how often it is called."""

    def __init__(self, f):
        self.f = f
        self.calls = 0
        self.shapes = []
        functools.update_wrapper(self, f)

    def __call__(self, *arrays, **options):
        self.calls += 1
        self.shapes.append([x.shape for x in arrays])
        return self.f(*arrays, **options)

    def during(self, program, *args):
        """The results of a program, and how often it calls the function when it is compiled
        already.
        """
        jax.block_until_ready(program(*args))
        before = self.calls
        return jax.block_until_ready(program(*args)), self.calls - before


@pytest.fixture
def total():
    return Counted(weighted)


def host(f, **options):
    return make_host(f, outputs=lambda x, *others, **static: x, **options)


def by_hand(f):
    def call(x, *others):
        return jax.pure_callback(
            f, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *others, vmap_method="sequential"
        )

    return call


# --- Values ---------------------------------------------------------------------------------------


def test_eager_and_compiled(compiler, total):
    result, calls = total.during(compiler(host(total)), X, jnp.array(W))
    np.testing.assert_array_equal(result, weighted(X, W))
    assert isinstance(result, jax.Array)
    assert calls == 1


A = np.arange(24.0).reshape(2, 3, 4) - 7.5
B = np.array([10.0, -3.0, 0.5])
BATCHES = {
    "an axis": (lambda f: jax.vmap(f, (1, None)), (A[0], W), 4),
    "an axis from the end": (lambda f: jax.vmap(f, (-1, None)), (A[0], W), 4),
    "to the last axis": (lambda f: jax.vmap(f, (1, None), 1), (A[0], W), 4),
    "of both arguments": (lambda f: jax.vmap(f), (A[0], B), 3),
    "of the second argument": (lambda f: jax.vmap(f, (None, 0)), (A[0, 0], B), 3),
    "of both, then of the first": (
        lambda f: jax.vmap(jax.vmap(f, (1, 0)), (0, None)),
        (A.transpose(0, 2, 1), B),
        6,
    ),
    "of one, then of the other": (
        lambda f: jax.vmap(jax.vmap(f, (1, None)), (None, 0)),
        (A[0], B),
        12,
    ),
    "of the other, then of one": (
        lambda f: jax.vmap(jax.vmap(f, (None, 0)), (1, None), 1),
        (A[0], B),
        12,
    ),
    "of jit": (lambda f: jax.vmap(jax.jit(f), (1, None)), (A[0], W), 4),
    "of no elements": (lambda f: jax.vmap(f, (0, None)), (np.zeros((0, 3)), W), 0),
    "of elements without elements": (lambda f: jax.vmap(f, (0, None)), (np.zeros((2, 0)), W), 2),
}


@pytest.mark.parametrize("vectorized", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(compiler, batch, vectorized):
    """One call on the host, in which f is called for each element, or once."""
    program, args, count = BATCHES[batch]
    counted = Counted((lambda x, w: weighted(x, w[..., None])) if vectorized else weighted)
    found, calls = counted.during(
        compiler(program(host(counted, vectorized=vectorized))), *map(jnp.asarray, args)
    )
    expected = program(lambda x, w: jnp.cumsum(x) * w)(*map(jnp.asarray, args))
    np.testing.assert_allclose(found, expected)
    assert found.shape == expected.shape
    if found.size:  # what is empty XLA knows
        assert calls == (1 if vectorized else count)


DTYPES = ["bfloat16", "float16", "float32", "complex64", "complex128", "int8", "int64", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(compiler, dtype):
    seen = []

    @host
    def backwards(x):
        seen.append(x.dtype.name)
        return x[..., ::-1]

    x = jnp.array([0, 1, 1]).astype(dtype)
    found = compiler(backwards)(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, x[::-1])
    np.testing.assert_array_equal(compiler(jax.vmap(backwards))(x[:, None]), x[:, None])
    assert set(seen) == {dtype}


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1, 1)])
def test_shapes(compiler, shape):
    double = host(lambda x: 2 * x)
    x = jnp.full(shape, 1.5)
    np.testing.assert_array_equal(compiler(double)(x), 2 * x)
    np.testing.assert_array_equal(compiler(jax.vmap(double))(x[None]), 2 * x[None])


def test_several_results(compiler):
    split = make_host(lambda x, w: {"sum": x.sum(), "parts": (x > 0, x * w)},
                      outputs=lambda x, w: {"sum": Spec((), x.dtype), "parts": (Spec(x.shape, "bool"), x)})  # fmt: skip
    found = compiler(split)(X, jnp.array(W))
    np.testing.assert_array_equal(found["sum"], 1.5)
    np.testing.assert_array_equal(found["parts"][0], [True, False, True])
    np.testing.assert_array_equal(found["parts"][1], 10 * X)


def test_64_bits_or_32(compiler):
    """What is declared with 64 bits has 32 where JAX has no more."""
    third = make_host(
        lambda x: (x / 3.0, np.arange(3)),
        outputs=lambda x: (Spec(x.shape, "float64"), Spec((3,), "int64")),
    )
    for enabled, names in ((False, ["float32", "int32"]), (True, ["float64", "int64"])):
        with enable_x64(enabled):
            found = compiler(third)(jnp.asarray(X, "float32"))
            assert [y.dtype.name for y in found] == names
            np.testing.assert_allclose(found[0], X.astype("float32") / 3, rtol=1e-7)


def test_numbers_in_jaxprs_keep_their_dtype():
    seen = set()
    op = host(lambda x: (seen.add(x.dtype.name), 2 * x)[1])
    three = jnp.float32(3)
    with jax.disable_jit():
        assert jax.jit(lambda x: op(three) + x)(jnp.float32(1)) == 7
    jaxpr = jax.make_jaxpr(lambda x: op(three) + x)(jnp.float32(1))
    assert jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, jnp.float32(1)) == [7]
    assert seen == {"float32"}


def test_memory(compiler):
    """f may keep its arguments and return its own buffer; a donated argument may be written over."""
    kept, buffer = [], np.zeros(3)

    @host
    def f(x):
        kept.append(x)
        np.multiply(x, 2.0, out=buffer)
        return buffer

    program = compiler(lambda x: f(x + 1.0))
    results = [program(jnp.array(X) + i) for i in range(5)]
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, 2 * (X + i + 1.0))
        np.testing.assert_array_equal(kept[i], X + i + 1.0)
    donated = jnp.array(X)
    np.testing.assert_array_equal(jax.jit(f, donate_argnums=0)(donated), 2 * X)
    if jax.__version_info__ < (0, 5) and jax.config.jax_compilation_cache_dir:
        pytest.skip("a program from JAX's cache writes over what np.asarray has returned")
    donated = jnp.array(X)
    f(donated)
    jax.jit(lambda x: 0 * x, donate_argnums=0)(donated)
    np.testing.assert_array_equal(kept[-1], X)


# --- How often f runs -----------------------------------------------------------------------------

PROGRAMS = {
    "unused": (lambda f: lambda x: (f(x), 5 * x)[1], 0),
    "equal calls": (lambda f: lambda x: f(x) + 2 * f(x), 2),
    "other arguments": (lambda f: lambda x: f(x) + 2 * f(x + 1), 2),
    "loop-invariant": (
        lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), x, None, length=7)[0],
        1,
    ),
    "scan": (lambda f: lambda x: jax.lax.scan(lambda c, _: (c + f(c), c), x, None, length=7), 7),
    "cond": (lambda f: lambda x: jax.lax.cond(x[0] < 0, f, lambda x: x, x), 0),
    "other branch": (lambda f: lambda x: jax.lax.cond(x[0] > 0, f, lambda x: x, x), 1),
    "while_loop": (
        lambda f: lambda x: jax.lax.while_loop(lambda c: c[-1] < 50, lambda c: f(c) + 1, x),
        None,
    ),
    "checkpoint": (lambda f: lambda x: jax.checkpoint(f)(x), 1),
    "map": (lambda f: lambda x: jax.lax.map(f, x[:, None]), 3),
    "map in batches": (lambda f: lambda x: jax.lax.map(f, x[:, None], batch_size=2), 3),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_calls_f_as_often_as_by_hand_or_less(program):
    make, count = PROGRAMS[program]
    mine, other = (
        Counted(lambda x: np.cumsum(x, -1)),
        Counted(lambda x: np.cumsum(np.asarray(x), -1)),
    )
    found, calls = mine.during(jax.jit(make(host(mine))), jnp.array(X))
    expected, calls_by_hand = other.during(jax.jit(make(by_hand(other))), jnp.array(X))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert calls <= calls_by_hand
    assert count is None or calls == count


def test_only_equal_calls_are_one():
    f = host(
        lambda x, *, s: (
            x
            + np.copysign(1, s[0] if isinstance(s, (list, tuple)) else s)
            + (s is True or s == [True])
        )
    )
    options = [0.0, -0.0, 1, True, (1,), (-0.0,), [1], [True]]
    found = jax.jit(lambda x: [f(x, s=s) for s in options])(jnp.zeros(()))
    assert list(map(float, found)) == [float(f(jnp.zeros(()), s=s)) for s in options]


def test_calls_of_equal_lists_are_not_one():
    f = host(lambda x, factors: x * factors[0])

    def both(x):
        factors = [2.0]
        first = f(x, factors)
        factors[0] = 3.0  # before it runs
        return first, f(x, [2.0])

    assert list(map(float, jax.jit(both)(jnp.ones(())))) == [3.0, 2.0]


def test_nothing_is_compiled_for_an_eager_call(total, caplog):
    op = host(total)
    x, w = jnp.array(X), jnp.array(W)
    programs = [
        op,
        jax.vmap(op, (0, None)),
        jax.grad(lambda x, w: (jax.lax.stop_gradient(op(x, w)) * x).sum()),
    ]
    args = [(x, w), (x[:, None], w), (x, w)]
    for program, given in zip(programs, args, strict=True):
        program(*given)
    with jax.log_compiles():
        for program, given in zip(programs, args, strict=True):
            program(*given)
    assert [record for record in caplog.records if "Compiling" in record.getMessage()] == []


# --- Gradients ------------------------------------------------------------------------------------


def an_op():
    """An op whose f and rule run on the host; the rule is wrong on purpose: 7 for what should be 1."""
    forward, backward = (
        Counted(lambda x: np.cumsum(x, -1)),
        Counted(lambda u: np.cumsum(u[..., ::-1], -1)[..., ::-1]),
    )
    there, back = host(forward), host(backward)

    @op_custom_gradient
    def op(x, w):
        y = there(x)
        return w * y, lambda upstream: (7.0 * back(w * upstream), 11.0 * (upstream * y).sum())

    return op, forward, backward


def gradients(x, w, upstream):
    return 7.0 * np.cumsum((w * upstream)[..., ::-1], -1)[..., ::-1], 11.0 * (
        upstream * np.cumsum(x, -1)
    ).sum(-1)


U = np.array([1.0, -2.0, 5.0])


def test_gradients(compiler):
    op, forward, backward = an_op()
    gradient = compiler(jax.grad(lambda x, w: (op(x, w) * U).sum(), (0, 1)))
    found, calls = forward.during(gradient, jnp.array(X), jnp.array(W))
    for mine, expected in zip(found, gradients(X, W, U), strict=True):
        np.testing.assert_allclose(mine, expected)
    assert calls == 1
    assert backward.during(gradient, jnp.array(X), jnp.array(W))[1] == 1


GRADIENTS = {
    "value and gradient": lambda op: jax.value_and_grad(lambda x: op(x).sum()),
    "of equal calls": lambda op: jax.grad(lambda x: (op(x) * op(x)).sum()),
    "checkpoint": lambda op: jax.grad(
        lambda x: jax.checkpoint(lambda x: op(jnp.sin(op(x))))(x).sum()
    ),
    "scan": lambda op: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (op(jnp.sin(c)), c), x, None, length=5)[0].sum()
    ),
    "loop-invariant": lambda op: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c + op(x), c), x, None, 5)[0].sum()
    ),
    "jacobian": jax.jacrev,
    "batch": lambda op: (
        lambda x: jax.vmap(jax.grad(lambda x: op(x).sum()))(jnp.stack([x, x + 1.0]))
    ),
}


@pytest.mark.parametrize("program", GRADIENTS)
def test_a_gradient_calls_f_as_often_as_by_hand_or_less(compiler, program):
    forward, backward = (
        Counted(lambda x: np.cumsum(np.asarray(x), -1)),
        Counted(lambda u: -2.0 * np.asarray(u)),
    )

    def squared(make):
        there, back = make(forward), make(backward)
        return there, lambda y, upstream: 7.0 * back(y * upstream)

    f, rule = squared(host)
    op = op_custom_gradient(lambda x: (lambda y: (y * y, functools.partial(rule, y)))(f(x)))
    f_by_hand, rule_by_hand = squared(by_hand)
    hand = jax.custom_vjp(lambda x: f_by_hand(x) ** 2)
    hand.defvjp(
        lambda x: (lambda y: (y * y, y))(f_by_hand(x)),
        lambda y, upstream: (rule_by_hand(y, upstream),),
    )
    mine, other = (compiler(GRADIENTS[program](each)) for each in (op, hand))
    for counted in (forward, backward):
        found, calls = counted.during(mine, jnp.array(X))
        expected, calls_by_hand = counted.during(other, jnp.array(X))
        jax.tree.map(np.testing.assert_allclose, found, expected)
        assert calls <= calls_by_hand


def test_jacobians(compiler):
    op, _, backward = an_op()
    found, calls = backward.during(compiler(jax.jacrev(op)), jnp.array(X), jnp.array(W))
    np.testing.assert_allclose(found, gradients(X, W, np.eye(3))[0])
    assert calls == 3


def test_gradients_of_a_batch(compiler):
    op, _, _ = an_op()
    xs, ws = A[0].T, np.arange(4.0)
    expected = [gradients(x, w, U) for x, w in zip(xs, ws, strict=True)]
    inside = compiler(jax.vmap(jax.grad(lambda x, w: (op(x, w) * U).sum(), (0, 1)), (1, 0)))
    outside = compiler(jax.grad(lambda x, w: (jax.vmap(op, (1, 0))(x, w) * U).sum(), (0, 1)))
    for of_x, of_w in (inside(A[0], ws), (lambda x, w: (x.T, w))(*outside(A[0], ws))):
        np.testing.assert_allclose(of_x, [x for x, _ in expected])
        np.testing.assert_allclose(of_w, [w for _, w in expected])


def test_gradients_in_loops(compiler):
    op, _, _ = an_op()

    def looped(x):
        return jax.lax.scan(lambda c, w: (op(c, w), None), x, jnp.array([1.0, -3.0]))[0]

    inner = 7.0 * np.cumsum((-3.0 * U)[::-1])[::-1]
    expected = 7.0 * np.cumsum(inner[::-1])[::-1]
    np.testing.assert_allclose(compiler(jax.grad(lambda x: (looped(x) * U).sum()))(X), expected)
    steps = compiler(
        lambda x: jax.lax.scan(
            lambda c, u: (c, jax.grad(lambda x: op(x, 2.0) @ u)(c)), x, np.eye(3)
        )[1]
    )
    np.testing.assert_allclose(steps(jnp.array(X)), gradients(X, 2.0, np.eye(3))[0])
    saved = compiler(
        jax.grad(lambda x: (jax.checkpoint(lambda x: op(op(x, 1.0), -3.0))(x) * U).sum())
    )
    np.testing.assert_allclose(saved(jnp.array(X)), expected)


def test_every_order_of_rules_that_are_ops(compiler):
    there, back = host(np.cumsum), host(lambda u: np.cumsum(u[::-1])[::-1], name="back")
    total = op_custom_gradient(lambda x: (there(x), lambda upstream: 7.0 * adjoint(upstream)))
    adjoint = op_custom_gradient(lambda u: (back(u), lambda upstream: 5.0 * total(upstream)))
    twice = compiler(jax.grad(lambda u: (jax.vjp(total, jnp.array(X))[1](u)[0] * X).sum()))
    np.testing.assert_allclose(twice(jnp.array(U)), 35.0 * np.cumsum(X))


# --- What is refused ------------------------------------------------------------------------------

NO_DERIVATIVE = (
    "weighted: what runs on the host has no derivative of its own, got a derivative of its result; "
    "call it within op_custom_gradient, and write the rule with ops that have one"
)


def refused(error, program, *args):
    with pytest.raises(error) as raised:
        program(*args)
    return str(raised.value)


def test_a_derivative_is_refused_where_one_is_taken(compiler, total):
    op = host(total)
    assert (
        refused(TransformationError, compiler(jax.grad(lambda x: op(x, W).sum())), jnp.array(X))
        == NO_DERIVATIVE
    )
    kept = op_custom_gradient(
        lambda x: (lambda y: (3 * y, lambda u: 7 * u * y))(op(x, jnp.array(W)))
    )
    np.testing.assert_allclose(
        compiler(jax.grad(lambda x: kept(x) @ U))(jnp.array(X)), 7 * U * weighted(X, W)
    )
    second = compiler(jax.grad(lambda x: jax.grad(lambda x: kept(x) @ U)(x).sum()))
    assert refused(TransformationError, second, jnp.array(X)) == NO_DERIVATIVE
    constant = compiler(jax.grad(lambda x: (jax.lax.stop_gradient(op(x, jnp.array(W))) * x).sum()))
    np.testing.assert_allclose(constant(jnp.array(X)), weighted(X, W))


def test_the_operation_itself_has_no_derivative(total):
    calls = []

    def spied(call, inputs):
        calls.append(call)
        return host_function(call, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cgshim_jax.host_function", spied)
        host(total)(jnp.array(X), jnp.array(W))
    alone = lambda x: host_function(calls[0], [x, jnp.array(W)])[0]
    assert (
        refused(TransformationError, jax.grad(lambda x: alone(x).sum()), jnp.array(X))
        == NO_DERIVATIVE
    )


def test_export_is_refused(total):
    from jax import export

    with pytest.raises(NotImplementedError, match="host_callbacks"):
        export.export(jax.jit(host(total)))(jnp.array(X), jnp.array(W))


def test_keys_are_refused(compiler):
    message = refused(
        CustomGradientTypeError, compiler(host(weighted)), jax.random.key(0), jnp.array(W)
    )
    assert message == (
        "weighted: a function on the host is given arrays of numbers, got key<fry>[]; give it jax.random.key_data(key)"
    )


def test_errors_of_f(compiler):
    @host
    def fails(x):
        if x.sum() > 0:
            raise KeyError("simulation 7")
        return x

    with pytest.raises(KeyError, match="simulation 7"), cgshim.host_errors():
        jax.block_until_ready(compiler(fails)(jnp.array(X)))
    np.testing.assert_array_equal(compiler(fails)(-jnp.array(X)), -X)
    with pytest.raises(KeyError, match="simulation 7"):
        fails(jnp.array(X))


def test_a_shape_that_was_not_declared(compiler):
    op = host(lambda x: x[:2], name="short")
    message = r"short: f must return an array of the declared shape f64\[3\], got f64\[2\]; declare the shape"
    with pytest.raises((CustomGradientValueError, jax.errors.JaxRuntimeError), match=message):
        jax.block_until_ready(compiler(op)(jnp.array(X)))


# --- What it leaves behind ------------------------------------------------------------------------


def test_f_may_use_jax(compiler):
    """Where it is called eagerly, and where a compiled program waits for it; jax.pure_callback
    waits for ever.
    """
    inner = jax.jit(lambda x: jnp.cumsum(jnp.sin(x)))
    op = host(lambda x: np.asarray(inner(x) * 2.0))
    for size in (3, 100_000):
        x = np.linspace(-1.0, 2.0, size)
        program = compiler(lambda x: op(x) + op(x + 1.0) + jax.vmap(op)(x[None])[0])
        expected = sum(2 * np.cumsum(np.sin(y)) for y in (x, x + 1.0, x))
        results = [program(jnp.array(x)) for _ in range(4)]  # which are not waited for
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-9)


def test_f_may_call_other_ops(compiler):
    """On NumPy, also an op with a rule on the host, whose gradient it takes."""
    inner = op_custom_gradient(
        lambda x: (x**3, lambda upstream: 7.0 * upstream * x), host_outputs=lambda x: x
    )
    outer = host(lambda x: host(np.cumsum)(x) + cgshim.op_vjp(inner, x)[1](np.array(U))[0])
    expected = np.cumsum(X) + 7.0 * U * X
    np.testing.assert_allclose(compiler(outer)(X), expected)
    np.testing.assert_allclose(
        compiler(jax.vmap(outer))(np.stack([X, X])), np.stack([expected] * 2)
    )


def test_donated_buffers():
    """XLA writes results into them: f has read its arguments before, and no rule reads what is
    gone.
    """
    kept = []
    op = host(lambda x: (kept.append(x.copy()), np.cumsum(x))[1])
    step = jax.jit(lambda x: op(x) + x, donate_argnums=0)
    x = jnp.array(X)
    for _ in range(3):
        x = step(x)
    expected = [X, X + np.cumsum(X)]
    expected.append(expected[1] + np.cumsum(expected[1]))
    np.testing.assert_allclose(kept, expected)
    np.testing.assert_allclose(x, expected[2] + np.cumsum(expected[2]))

    squared = op_custom_gradient(lambda x: (x * x, lambda u: 7.0 * u * x), host_outputs=lambda x: x)
    large = np.arange(1e5) - 7.0
    x = jnp.array(large)
    _, pullback = jax.vjp(squared, x)
    jax.block_until_ready(jax.jit(lambda x: x * 0.0 - 1.0, donate_argnums=0)(x))
    with pytest.raises(RuntimeError, match="deleted"):
        pullback(x)
    gradient = jax.jit(jax.grad(lambda x: (x * squared(x)).sum()), donate_argnums=0)
    np.testing.assert_allclose(gradient(jnp.array(large)), large**2 + 7.0 * large**2)


def test_nothing_is_kept_alive():
    op = host(lambda x, *others: np.cumsum(x, -1))
    references = []

    class Static:
        pass

    def traced(number):
        static, w = Static(), jnp.full(3, float(number))
        local = host(lambda x, static: 2 * x)
        references.extend(map(weakref.ref, (static, w, local)))
        program = lambda x: local(x + w, static).sum()
        jax.jit(program).lower(X)
        if number % 20 == 0:
            jax.jit(program)(X)
            jax.jit(jax.vmap(program))(X[None])
            jax.grad(lambda x: x.sum() * jax.lax.stop_gradient(program(x)))(X)

    for _ in range(500):
        references.append(weakref.ref(op(jnp.array(X))))
    assert references[-1]() is None
    for number in range(60):
        traced(number)
    gc.collect()
    assert [reference() for reference in references if reference() is not None] == []


# --- Several devices ------------------------------------------------------------------------------


def test_on_four_devices():
    assert printed_on_devices(4, __file__) == list(ON_DEVICES)


def cumsum_of_parts(x):
    return np.cumsum(x.reshape(4, -1), -1).reshape(x.shape)


def _meshes():
    kinds = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    return (jax.make_mesh((4,), ("d",), axis_types=(kind,)) for kind in kinds)


def _pmap(op, x, mesh, explicit):
    yield jax.pmap(op), x.reshape(4, 2), np.cumsum(x.reshape(4, 2), -1), 4


def _shard_map(op, x, mesh, explicit):
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    yield jax.jit(shard(op)), x, cumsum_of_parts(x), 4
    yield jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)), x, \
        cumsum_of_parts(x), 4  # fmt: skip
    yield jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P(), out_specs=P())), x, np.cumsum(x), 4
    yield jax.jit(shard(jax.vmap(op))), x.reshape(4, 2), np.cumsum(x.reshape(4, 2), -1), 4
    yield (
        jax.jit(jax.vmap(shard(op))),
        np.stack([x, -x]),
        np.stack([cumsum_of_parts(x), -cumsum_of_parts(x)]),
        8,
    )
    loop = shard(lambda x: jax.lax.scan(lambda c, _: (op(c), None), x, None, length=2)[0])
    yield jax.jit(loop), x, cumsum_of_parts(cumsum_of_parts(x)), 8


def _both_in_one_program(op, x, mesh, explicit):
    whole = jax.shard_map(op, mesh=mesh, in_specs=P(), out_specs=P())
    yield jax.jit(lambda x: op(x) + 2 * whole(x)), x, 3 * np.cumsum(x), 5


def _gradients(op, x, mesh, explicit):
    rule = op_custom_gradient(lambda x: (op(x), lambda u: 7.0 * op(u)))
    shard = jax.shard_map(rule, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    weights = np.arange(8.0)
    yield (
        jax.jit(jax.grad(lambda x: (shard(x) * weights).sum())),
        x,
        7 * cumsum_of_parts(weights),
        None,
    )
    yield jax.jit(jax.grad(lambda x: (rule(x) * weights).sum())), x, 7 * np.cumsum(weights), None


def _sharded(op, x, mesh, explicit):
    rows = jax.device_put(x.reshape(4, 2), NamedSharding(mesh, P("d", None)))
    total, x = np.cumsum(x), jax.device_put(x, NamedSharding(mesh, P("d")))
    for program in (op, jax.jit(op)):
        yield program, x, total, 1
    yield jax.jit(lambda x: op(2 * x) + x), x, 2 * total + np.asarray(x), 1
    yield jax.jit(jax.vmap(op)), rows, np.cumsum(np.asarray(rows), -1), 4


def _explicit(op, x, mesh, explicit):
    with jax.set_mesh(explicit):
        rows = jax.device_put(x.reshape(4, 2), NamedSharding(explicit, P("d", None)))
        total, x = np.cumsum(x), jax.device_put(x, NamedSharding(explicit, P("d")))
        yield op, x, total, 1
        yield jax.jit(lambda x: op(x) + x.sum()), x, total + total[-1], 1
        yield jax.jit(jax.vmap(op)), rows, np.cumsum(np.asarray(rows), -1), 4


def _placed(op, x, mesh, explicit):
    assert not op(jnp.asarray(x)).committed
    for device in jax.devices():
        for program in (op, jax.jit(op), jax.vmap(op)):
            found = program(jax.device_put(x[None], device))
            assert found.devices() == {device}
            assert found.committed
    yield op, x, np.cumsum(x), 1


ON_DEVICES = {
    "pmap": _pmap, "shard_map": _shard_map, "both in one program": _both_in_one_program, "gradients": _gradients,
    "sharded": _sharded, "explicit": _explicit, "placed": _placed,
}  # fmt: skip


if __name__ == "__main__":
    for name, checks in ON_DEVICES.items():
        counted = Counted(lambda x: np.cumsum(x, -1))
        for program, x, expected, count in checks(host(counted), np.arange(8.0) - 2.5, *_meshes()):
            found, calls = counted.during(program, jnp.asarray(x))
            np.testing.assert_allclose(found, expected, err_msg=name)
            assert count in (None, calls), (name, calls)
        print(name)
