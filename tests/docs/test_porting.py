"""docs/porting.md: each op there and the same op here agree on their framework, in value and two derivatives."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_grad, op_sum, op_vjp, use_backend

PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
BACKENDS = {
    "torch.autograd.Function": ["torch"],
    "jax.custom_vjp": ["jax"],
    "tf.custom_gradient": ["tensorflow"],
    "keras.ops.custom_gradient": ["jax", "torch", "tensorflow"],
    "autograd.extend.primitive": ["numpy"],
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
    backend: str
    name: str
    there: str
    here: str


def pairs():
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            there, here = re.findall(r"^```python\n(.*?)^```", part, flags=re.MULTILINE | re.DOTALL)
            for backend in BACKENDS[section.splitlines()[0]]:
                yield Pair(backend, part.splitlines()[0], there, here)


def pytest_generate_tests(metafunc):
    """A pair is tested in the runs that test its backend. Keras has only one in a process."""
    if "pair" in metafunc.fixturenames:
        backends = metafunc.config.option.backends
        others = sorted(set(backends) - {"numpy"}, key="tensorflow".__ne__)  # it may import Keras for itself
        of_keras = others[:1]
        chosen = [pair for pair in pairs() if pair.backend in (of_keras if "keras" in pair.there else backends)]
        metafunc.parametrize("pair", chosen, ids=lambda pair: f"{pair.backend}-{pair.name}")


def test_every_section_has_a_pair():
    assert {pair.backend for pair in pairs()} == {"numpy", "jax", "torch", "tensorflow"}
    assert len(list(pairs())) >= 14


def test_both_have_the_same_value_and_derivatives(pair):
    arrays, rest = ARGUMENTS.get(pair.name, ([X], []))
    with use_backend(pair.backend):
        there, here = (function_of(pair, code) for code in (pair.there, pair.here))
        found, expected = (derivatives(op, arrays, rest) for op in (here, there))
    if "keras" in pair.there and pair.backend == "torch":
        assert not expected.pop().any()  # as the page says
        assert found.pop().all()
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


def function_of(pair, code):
    if "keras" in code:
        os.environ.setdefault("KERAS_BACKEND", pair.backend)
    namespace = {"__name__": "porting"}
    exec(compile(code, str(PAGE), "exec"), namespace)
    return namespace[pair.name]


def derivatives(op, arrays, rest):
    """The value, the gradients for an upstream gradient that no two elements share, and those of their cubes."""
    args = [op_convert_to_tensor(array, "float64") for array in arrays]
    value, pullback = op_vjp(lambda *args: op(*args, *rest), *args)
    upstream = np.linspace(0.7, 2.3, np.size(op_convert_to_numpy(value))).reshape(value.shape)
    gradients = pullback(op_convert_to_tensor(upstream, "float64"))

    def of_gradients(*args):
        _, pullback = op_vjp(lambda *args: op(*args, *rest), *args)
        return sum(op_sum(g**3) for g in pullback(op_convert_to_tensor(upstream, "float64")))

    seconds = op_grad(of_gradients, argnums=list(range(len(args))))(*args)
    return list(map(op_convert_to_numpy, [value, *gradients, *seconds]))
