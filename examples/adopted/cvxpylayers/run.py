"""Compares cvxpylayers with itself, with the adapter in the place of its own gradients.

`python examples/adopted/cvxpylayers/run.py` prints what passes, what fails, and the ratio of times.
The wheel and the sdist of cvxpylayers hold no tests: these are its examples and its documented
uses, and the transformations around them that a user of its frameworks expects.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cvxpy as cp
import jax
import jax.numpy as jnp
import numpy as np
import torch
from cvxpylayers.interfaces import diffcp_if
from cvxpylayers.jax import CvxpyLayer as JaxLayer, cvxpylayer as in_jax
from cvxpylayers.torch import CvxpyLayer as TorchLayer

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter import install
from comparison import compare, print_lines, print_ratios

jax.config.update("jax_enable_x64", True)
RANDOM = np.random.default_rng(7)
EXACT = {"eps": 1e-10}
TRANSFORMED = {"jit": jax.jit, "eager": lambda f: f}


def least_squares():
    """Constrained least squares: the example of its README."""
    x, a, b = cp.Variable(3), cp.Parameter((4, 3)), cp.Parameter(4)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(a @ x - b) + 0.1 * cp.norm1(x)), [x >= -1])
    return problem, [a, b], [x], [RANDOM.normal(size=(4, 3)), RANDOM.normal(size=4)]


def projection():
    """A projection onto the simplex, with the dual variable of its equation."""
    x, y = cp.Variable(4), cp.Parameter(4)
    equation = cp.sum(x) == 1
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - y)), [equation, x >= 0])
    return problem, [y], [x, equation.dual_variables[0]], [RANDOM.normal(size=4)]


def cone():
    """A second-order cone program."""
    x, c, r = cp.Variable(3), cp.Parameter(3), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(c @ x), [cp.norm(x - 0.3) <= r])
    return problem, [c, r], [x], [RANDOM.normal(size=3), np.array(1.7)]


PROBLEMS = {each.__name__: each() for each in (least_squares, projection, cone)}


def weighted(solutions, variables, library):
    """A loss with another weight for each number of a solution."""
    weights = [library.arange(1.0, 1.0 + v.size) if v.ndim else 1.0 for v in variables]
    pairs = zip(solutions, weights, strict=True)
    return sum((at + 2.0) * (y * weight).sum() for at, (y, weight) in enumerate(pairs))


def torch_case(name, batch=False, dtype=torch.float64, compiled=False):
    problem, parameters, variables, values = PROBLEMS[name]
    layer = TorchLayer(problem, parameters, variables, solver_args=EXACT)
    run = torch.compile(layer) if compiled else layer

    def case():
        given = [np.stack([x, 1.5 * x]) if batch else x for x in values]
        inputs = [torch.tensor(x, dtype=dtype, requires_grad=True) for x in given]
        solutions = run(*inputs)
        weighted(solutions, variables, torch).backward()
        return [x.detach() for x in solutions] + [x.grad for x in inputs]

    return case


def jax_case(name, batch=False, transformed="eager", mapped=False):
    problem, parameters, variables, values = PROBLEMS[name]
    layer = JaxLayer(problem, parameters, variables, solver_args=EXACT)

    def loss(*inputs):
        solutions = layer(*inputs)
        return weighted(solutions, variables, jnp), solutions

    def case():
        inputs = [jnp.stack([x, 1.5 * x]) if batch or mapped else jnp.asarray(x) for x in values]
        gradients = jax.grad(loss, range(len(inputs)), has_aux=True)
        gradients = TRANSFORMED[transformed](jax.vmap(gradients) if mapped else gradients)
        of_inputs, solutions = gradients(*inputs)
        return [*solutions, *of_inputs]

    return case


def without_gradients(library):
    problem, parameters, variables, values = PROBLEMS["least_squares"]
    layer = (TorchLayer if library is torch else JaxLayer)(problem, parameters, variables)
    make = torch.tensor if library is torch else jnp.asarray
    return lambda: layer(*map(make, values))


CASES = {
    **{f"{name}, {kind}": torch_case(name, **how)
       for name in PROBLEMS for kind, how in {
           "torch": {}, "torch, batched": {"batch": True}, "torch, float32": {"dtype": torch.float32},
       }.items()},
    "least_squares, torch.compile": torch_case("least_squares", compiled=True),
    **{f"{name}, {kind}": jax_case(name, **how)
       for name in PROBLEMS for kind, how in {
           "jax": {}, "jax, batched": {"batch": True}, "jax.jit": {"transformed": "jit"},
           "jax.jit, batched": {"batch": True, "transformed": "jit"},
           "jax.vmap": {"mapped": True}, "jax.jit of jax.vmap": {"mapped": True, "transformed": "jit"},
       }.items()},
    "no gradients, torch": without_gradients(torch),
    "no gradients, jax": without_gradients(jnp),
}  # fmt: skip
EXPECTED = {}
for name in PROBLEMS:  # what JAX's layer cannot be asked for is compared with what it can
    EXPECTED[f"{name}, jax.jit"] = CASES[f"{name}, jax"]
    for mapped in ("jax.jit, batched", "jax.vmap", "jax.jit of jax.vmap"):
        EXPECTED[f"{name}, {mapped}"] = CASES[f"{name}, jax, batched"]


def main():
    own = diffcp_if._CvxpyLayer, in_jax.CvxpyLayer._solve_with_custom_vjp

    def uninstall():
        diffcp_if._CvxpyLayer, in_jax.CvxpyLayer._solve_with_custom_vjp = own

    failed = compare(CASES, EXPECTED, install, uninstall)
    timed = {name: CASES[name] for name in CASES if name.endswith((", torch", ", jax"))}
    print_ratios(timed, install, uninstall)
    data = diffcp_if.DIFFCP_data
    replaced = [*own, diffcp_if.DIFFCP_ctx.jax_to_data, data.jax_solve, data.jax_solve_only]
    print_lines([*replaced, data.jax_derivative], Path(__file__).with_name("adapter.py"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
