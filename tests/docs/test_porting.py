"""Each op by hand in docs/porting.md agrees with the same op here, in value and two derivatives."""

import importlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from cgshim import (
    CustomGradientError,
    CustomGradientTypeError,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    op_sum,
    op_vjp,
    ops,
    use_backend,
)

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "porting.md", ROOT / "examples" / "porting" / "README.md"]
BACKENDS = {
    "PyTorch": ["torch"],
    "JAX": ["jax"],
    "TensorFlow": ["tensorflow"],
    "Keras": ["jax", "torch", "tensorflow"],
    "NumPy": ["numpy"],
}
X = np.array([0.5, -1.25, 3.0, 0.75])
ARGUMENTS = {
    "linear": ([X.reshape(2, 2), np.array([[1.0, 2.0, -0.5], [0.25, 3.0, 7.0]])], [1.5]),
    "clip_gradient": ([X], [-0.9, 2.0]),
    "product": ([X, X[::-1].copy()], []),
    "scaled_square": ([X, np.array(1.5)], []),
}
"""the tensors, and what else each function takes; the others take one vector"""


class Pair(NamedTuple):
    page: Path
    backend: str
    name: str
    there: str
    here: str


def pairs():
    for page in PAGES:
        yield from pairs_of(page)


def pairs_of(page):
    tabs = re.search(
        r"^<!-- tabs -->$(.*)^<!-- end of tabs -->$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    for section in re.split(r"^## ", tabs[1], flags=re.MULTILINE)[1:]:
        for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            there, here = re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
            for backend in BACKENDS[section.splitlines()[0]]:
                yield Pair(page, backend, part.splitlines()[0], there, here)


def pytest_generate_tests(metafunc):
    """A pair is tested in the runs that test its backend. Keras has only one in a process."""
    if "twin" in metafunc.fixturenames:
        chosen = [
            (name, twin) for name in metafunc.config.option.backends for twin in twins_of(name).all
        ]
        metafunc.parametrize(
            ("framework", "twin"), chosen, ids=[f"{name}-{twin.row}" for name, twin in chosen]
        )
    if "pair" in metafunc.fixturenames:
        backends = metafunc.config.option.backends
        # it may import Keras for itself
        others = sorted(set(backends) - {"numpy"}, key="tensorflow".__ne__)
        of_keras = others[:1]
        chosen = [
            pair
            for pair in pairs()
            if pair.backend in (of_keras if "keras" in pair.there else backends)
        ]
        metafunc.parametrize("pair", chosen, ids=lambda pair: f"{pair.backend}-{pair.name}")


def test_every_section_has_a_pair():
    assert {pair.backend for pair in pairs()} == {"numpy", "jax", "torch", "tensorflow"}
    assert len(list(pairs())) >= 15


def test_both_have_the_same_value_and_derivatives(pair):
    arrays, rest = ARGUMENTS.get(pair.name, ([X], []))
    with use_backend(pair.backend):
        there, here = (function_of(pair, code) for code in (pair.there, pair.here))
        found, expected = (derivatives(op, arrays, rest) for op in (here, there))
    if "keras" in pair.there and pair.backend == "torch":
        assert not expected.pop().any()  # as the page says
        assert found.pop().all()
    assert_equal(found, expected)


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def function_of(pair, code):
    if "keras" in code:
        os.environ.setdefault("KERAS_BACKEND", pair.backend)
    namespace = {"__name__": "porting"}
    exec(compile(code, str(pair.page), "exec"), namespace)
    return namespace[pair.name]


def derivatives(op, arrays, rest=(), orders=2):
    """The value, the gradients for an upstream gradient that no two elements share, and those of
    their cubes.
    """
    args = [op_convert_to_tensor(array, "float64") for array in arrays]
    if orders == 0:
        return [op_convert_to_numpy(op(*args))]
    value, pullback = op_vjp(lambda *args: op(*args, *rest), *args)
    upstream = np.linspace(0.7, 2.3, np.size(op_convert_to_numpy(value))).reshape(value.shape)
    gradients = pullback(op_convert_to_tensor(upstream, "float64"))
    if orders == 1:
        return list(map(op_convert_to_numpy, [value, *gradients]))

    def of_gradients(*args):
        _, pullback = op_vjp(lambda *args: op(*args, *rest), *args)
        return sum(op_sum(g**3) for g in pullback(op_convert_to_tensor(upstream, "float64")))

    seconds = op_grad(of_gradients, argnums=list(range(len(args))))(*args)
    return list(map(op_convert_to_numpy, [value, *gradients, *seconds]))


# --- The rows of the tables -----------------------------------------------------------------------


def twins_of(framework):
    return importlib.import_module(f"twins_{framework}").twins


def test_every_row_has_a_twin(backend):
    """A row's twin is in twins_BACKEND.py, a pair of the page, or in another test."""
    (section,) = [
        part for part in re.split("^## ", PAGES[0].read_text(), flags=re.MULTILINE)
        if BACKENDS.get(part.splitlines()[0]) == [backend]
    ]  # fmt: skip
    rows = re.findall(r"^\| (.*?) \| ", section, re.MULTILINE)[1:]
    twins = twins_of(backend)
    assert {*rows} == {twin.row for twin in twins.all} | {*twins.elsewhere}
    tests = "".join(map(str, (ROOT / "tests").rglob("test_*.py"))) + Path(__file__).read_text()
    known = {pair.name for pair in pairs() if pair.backend == backend}
    for name in twins.elsewhere.values():
        assert name in known or name in tests


def test_a_row_by_hand_and_here(framework, twin):
    arrays = [X, *map(np.asarray, twin.more)]
    with use_backend(framework):
        by_hand, *here = twin.make()
        expected = derivatives(by_hand, arrays, orders=twin.orders)
        for op in here:
            assert_equal(derivatives(op, arrays, orders=twin.orders), expected)


# --- What the page says of every framework, and of torch's mark_dirty and ctx ---------------------


def tensor(array):
    return op_convert_to_tensor(np.asarray(array), "float64")


@pytest.mark.parametrize("flat", [True, False])
def test_an_output_that_is_no_tensor_has_no_upstream_gradient(backend, flat):
    seen = []

    @op_custom_gradient
    def op(x):
        def of_each(*upstreams):
            seen.append(upstreams)
            return 3.0 * upstreams[-1]

        return (2 * x, 7, x * x), of_each if flat else lambda upstream: of_each(*upstream)

    with use_backend(backend):
        (_, number, _), pullback = op_vjp(op, tensor(3.0))
        (gradient,) = pullback((tensor(1.0), None, tensor(10.0)))
    assert number == 7
    assert float(gradient) == 30.0
    assert [upstream is None for upstream in seen[0]] == (
        [False, False] if flat else [False, True, False]
    )


def scaled(x, holder):
    return x * holder.weight, lambda upstream: (5.0 * upstream * holder.weight, None)


def test_tensors_in_a_static_argument_are_constants_or_refused(backend):
    op = op_custom_gradient(scaled)
    with use_backend(backend):
        x, weight = tensor([1.0, 2.0]), tensor(3.0)
        constant = op_grad(lambda x: op_sum(op(x, SimpleNamespace(weight=weight))))(x)
        np.testing.assert_allclose(op_convert_to_numpy(constant), [15.0, 15.0])
        with pytest.raises(
            CustomGradientTypeError,
            match=r"trainable state|given every tensor that is differentiated",
        ):
            op_grad(lambda weight: op_sum(op(x, SimpleNamespace(weight=weight))))(weight)


def test_a_differentiated_tensor_in_an_option_raises(backend):
    op = op_custom_gradient(
        lambda x, *, weight: (op_sum(x * weight), lambda upstream: upstream * weight), name="op"
    )
    with use_backend(backend), pytest.raises(CustomGradientTypeError, match="in the option weight"):
        op_grad(lambda weight: op(tensor([1.0, 2.0]), weight=weight))(tensor(3.0))


def exp_with_ctx(ctx, x):
    """exp, with a derivative of x**2 * exp(x) on purpose; ctx gets the output, and a residual that
    is none.
    """
    ctx.y, ctx.square = ops.exp(x), x * x
    return ctx.y, lambda upstream: (None, upstream * ctx.y * ctx.square)


def test_an_object_like_ctx_that_is_an_argument(backend):
    op, expected = op_custom_gradient(exp_with_ctx), np.exp(2.0) * np.array([4.0, 4.0 * 4 + 2 * 2])
    with use_backend(backend):
        first = op_grad(lambda x: op(SimpleNamespace(), x))
        assert float(op_convert_to_numpy(first(tensor(2.0)))) == pytest.approx(expected[0])


@pytest.mark.parametrize("kind", [tuple, list])
def test_autograds_boxes_are_plain_where_f_runs(backends, kind):
    if "numpy" not in backends:
        return
    import autograd

    @op_custom_gradient
    def op(pair):
        assert type(pair) is kind
        assert [type(x) for x in pair] == [np.ndarray] * 2
        return op_sum(pair[0] * pair[1]), lambda upstream: (
            kind([upstream * pair[1], 10 * upstream * pair[0]]),
        )

    found = autograd.grad(op)(kind([X, 2 * X]))
    assert isinstance(found, kind)
    np.testing.assert_allclose(found, [2 * X, 10 * X])


def torch_of():
    import torch

    return torch


def _module_by_functional_call(module):
    call = torch_of().func.functional_call

    def both(x, parameters):
        return call(module, parameters, call(module, parameters, x))

    @op_custom_gradient
    def op(x, parameters):
        return both(x, parameters), lambda upstream: op_vjp(both, x, parameters)[1](5.0 * upstream)

    return lambda x: op(x, dict(module.named_parameters()))


def _module_by_variables(module):
    @op_custom_gradient(variables=list(module.parameters()))
    def op(x):
        def grad(upstream, variables):
            both = lambda x: module(module(x))
            _, pullback = op_vjp(both, x, variables=variables)
            return pullback(5.0 * upstream)

        return module(module(x)), grad

    return op


@pytest.mark.parametrize("op_of", [_module_by_functional_call, _module_by_variables])
def test_parameters_of_a_module_in_torch(backends, op_of):
    """That are arguments by hand, and read in the module; 5 is wrong on purpose."""
    if "torch" not in backends:
        return
    torch = torch_of()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
    x = torch.tensor(X, requires_grad=True)
    wanted = [x, *module.parameters()]
    upstream = torch.linspace(0.7, 2.3, 4, dtype=torch.float64)
    expected = torch.autograd.grad(module(module(x)), wanted, 5 * upstream)
    found = torch.autograd.grad(op_of(module)(x), wanted, upstream)
    torch.testing.assert_close(found, expected)


def test_what_f_gets_in_torch_requires_no_gradient(backends):
    if "torch" not in backends:
        return
    seen = []

    @op_custom_gradient
    def op(x, w, *, needs_input_grad):
        seen.append(((x.requires_grad, w.requires_grad), needs_input_grad))
        return x * w, lambda upstream: (upstream * w, upstream * x)

    torch = torch_of()
    op(torch.tensor(2.0, requires_grad=True), torch.tensor(3.0))
    assert seen == [((False, False), (True, False))]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda upstream: (upstream, upstream), "the gradient of w must have its shape f64"),
        (lambda upstream: (upstream, upstream.sum(), None), "one gradient for each argument"),
    ],
)
def test_what_torch_sums_or_ignores_in_gradients_is_an_error(backends, rule, message):
    if "torch" not in backends:
        return
    torch = torch_of()
    op = op_custom_gradient(lambda x, w: (x * w, rule))
    x, w = torch.tensor(X, requires_grad=True), torch.tensor(2.0, dtype=torch.float64)
    with pytest.raises(CustomGradientError, match=message):
        op(x, w.requires_grad_()).sum().backward()


class Context:
    """What a forward function keeps for its backward function."""


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("kind", [SimpleNamespace, Context])
def test_what_keeps_residuals_under_vmap_and_torch_compile(backends, kind):
    if "torch" not in backends:
        return
    torch = torch_of()

    @op_custom_gradient
    def op(x):
        ctx = kind()
        ctx.square = x * x
        return ctx.square * x, lambda upstream: 5 * upstream * ctx.square

    x = torch.tensor(X)
    derivatives = {
        SimpleNamespace: torch.func.vmap(torch.func.grad(op)),
        Context: torch.func.grad(lambda x: op(x).sum()),
    }
    torch.testing.assert_close(derivatives[kind](x), 5 * x * x)
    if kind is Context:
        compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
        (gradient,) = torch.autograd.grad(compiled(x.requires_grad_()).sum(), x)
        torch.testing.assert_close(gradient, 5 * x * x)
