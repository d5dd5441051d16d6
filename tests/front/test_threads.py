"""Eight threads at once: each call's rule, residuals and upstream gradients are its own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import cgshim
from cgshim.testing.conformance import Framework

THREADS = 8


@cgshim.op_custom_gradient
def scaled_square(x, scale):
    """Its rule has a factor that tells the calls apart: 7 times the scale for 2."""
    residual = x * scale
    return {"y": x * residual}, lambda upstream: (7.0 * upstream["y"] * residual, None)


def test_eight_threads_at_once(backend: str) -> None:
    framework = Framework(backend)
    together = threading.Barrier(THREADS)

    def work(number: int) -> list[np.ndarray]:
        together.wait()
        found = []
        for round_ in range(5):
            x, scale = framework.tensor([1.0 + number, 2.0 + round_]), float(number + 1)
            _, pullback = cgshim.op_vjp(lambda x, scale=scale: scaled_square(x, scale)["y"], x)
            found.append(framework.numpy(pullback(framework.tensor([2.0, -3.0]))[0]))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    for number, found in enumerate(results):
        expected = [
            7.0 * (number + 1) * np.array([2.0 * (1 + number), -3.0 * (2 + r)]) for r in range(5)
        ]
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_first_calls_in_eight_threads(backend: str) -> None:
    """Whatever is found out once (a signature, an owner, a backend) may be found out by all at
    once.
    """
    framework = Framework(backend)
    together = threading.Barrier(THREADS)
    op = cgshim.op_custom_gradient(
        lambda x: (x * x, lambda *args, upstream: 7.0 * upstream * args[0])
    )

    def work(number: int) -> np.ndarray:
        x = framework.tensor(1.0 + number)
        together.wait()
        return framework.numpy(cgshim.op_vjp(op, x)[1](framework.tensor(3.0))[0])

    with ThreadPoolExecutor(THREADS) as pool:
        np.testing.assert_allclose(
            list(pool.map(work, range(THREADS))), 21.0 * (1 + np.arange(THREADS))
        )
