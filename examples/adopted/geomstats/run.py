"""Compares geomstats with itself, with the adapter in the place of its custom_gradient.

`python examples/adopted/geomstats/run.py` prints what passes, what fails, and the ratio of times,
for each of its backends. The wheel and the sdist of geomstats hold no tests: these are the two
metrics that have custom gradients, and functions as its documentation writes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter import install
from comparison import compare, print_lines, print_ratios

BACKENDS = "autograd", "pytorch"


def cases_of(gs):
    """Return the cases, and what is known of them."""
    from geomstats.geometry.grassmannian import Grassmannian
    from geomstats.geometry.special_euclidean import SpecialEuclidean

    diff, array = gs.autodiff, gs.array
    cases, expected = {}, {}

    def case(name, function, numbers=None):
        cases[name] = lambda: [gs.to_numpy(y) for y in function()]
        if numbers is not None:
            expected[name] = lambda: numbers

    x, rows = array([1.0, 3.0]), array([[1.0, 3.0], [2.0, -5.0]])

    def norm():  # the gradients are 3x, not 2x: they are the rule's
        return diff.custom_gradient(lambda x: 3 * x)(lambda x: gs.sum(x * x, axis=-1))

    case("one argument", lambda: diff.value_and_grad(norm())(x), [10.0, [3.0, 9.0]])
    case("a batch", lambda: diff.value_and_grad(norm())(rows),
         [[10.0, 29.0], [[3.0, 9.0], [6.0, -15.0]]])  # fmt: skip
    case("within a loss", lambda: diff.value_and_grad(lambda x: 5 * norm()(2 * x))(x),
         [200.0, [60.0, 180.0]])  # fmt: skip
    case("jacobian", lambda: [diff.jacobian(norm())(x)], [[3.0, 9.0]])
    case("hessian", lambda: [diff.hessian(norm())(x)], [[[3.0, 0.0], [0.0, 3.0]]])
    for count in (2, 3, 4):

        def product(count=count):
            factors = [lambda *xs, at=at: (at + 2.0) * xs[at - 1] for at in range(count)]
            return diff.custom_gradient(*factors)(lambda *xs: gs.sum(xs[0] * xs[-1], axis=-1))

        points = [array([1.0 + at, 2.0 - at]) for at in range(count)]
        known = [np.array([1.0 + at, 2.0 - at]) for at in range(count)]
        gradients = [(at + 2.0) * known[at - 1] for at in range(count)]

        def in_each(points=points, product=product, count=count):
            return [
                diff.value_and_grad(lambda x, at=at: product()(*points[:at], x, *points[at + 1 :]))(
                    points[at]
                )[1]
                for at in range(count)
            ]

        case(f"each of {count} arguments", in_each, gradients)

    spaces = {"Grassmannian": Grassmannian(4, 2), "SE(2)": SpecialEuclidean(2)}
    for name, space in spaces.items():
        metric = space.metric
        gs.random.seed(3)
        a, b = space.random_point(2), space.random_point(2)
        for at, other in enumerate((b, a)):
            point = (a, b)[at]

            def distance(x, at=at, other=other, metric=metric):
                return metric.squared_dist(*((x, other) if at == 0 else (other, x)))

            def differentiated(distance=distance, point=point):
                return diff.value_and_grad(distance, point_ndims=2)(point)

            case(f"squared_dist of {name}, argument {at}", differentiated,
                 [gs.to_numpy(metric.squared_dist(a, b)), gs.to_numpy(-2 * metric.log(other, point))])  # fmt: skip
        case(
            f"squared_dist of {name}, no gradient",
            lambda a=a, b=b, m=metric: [m.squared_dist(a, b)],
        )
    if gs.__name__ == "geomstats.pytorch":
        import torch

        case("torch.func.grad", lambda: [torch.func.grad(norm())(x)], [[3.0, 9.0]])
        case("torch.func.vmap of grad", lambda: [torch.func.vmap(torch.func.grad(norm()))(rows)],
             [[[3.0, 9.0], [6.0, -15.0]]])  # fmt: skip
    return cases, expected


def compared(backend):
    import geomstats.backend as gs

    own, (cases, expected) = gs.autodiff.custom_gradient, cases_of(gs)

    def uninstall():
        gs.autodiff.custom_gradient = own

    print(f"geomstats on {backend}")
    failed = compare(cases, expected, install, uninstall)
    print_ratios({name: cases[name] for name in cases if name in TIMED}, install, uninstall)
    print_lines([own], Path(__file__).with_name("adapter.py"))
    return failed


TIMED = "a batch", "squared_dist of Grassmannian, argument 0", "squared_dist of SE(2), argument 1"


def main():
    failed = 0
    for backend in BACKENDS:
        environment = {**os.environ, "GEOMSTATS_BACKEND": backend}
        failed += subprocess.run([sys.executable, __file__], env=environment).returncode
    return failed


if __name__ == "__main__":
    of_one = os.environ.get("GEOMSTATS_BACKEND")
    sys.exit(compared(of_one) if of_one else main())
