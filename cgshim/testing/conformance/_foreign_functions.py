"""Functions of another framework's tensors: their derivatives, of every order, are those of that framework."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cgshim
from cgshim import BackendError, op_host
from cgshim._registry import load
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

X, W, UPSTREAM = np.array([1.0, 2.0, 4.0]), np.array(3.0), np.array([1.0, -2.0, 5.0])


def _others(framework: Framework) -> list[str]:
    """The other frameworks of this run; NumPy is always one."""
    return [name for name in cgshim.available_backends() if name != framework.name and name in sys.modules]


def _op(backend: str) -> Any:
    """sin(x) w w, by the ops of a backend."""

    def f(x: Any, w: Any) -> Any:
        assert load(backend).is_tensor(x)
        assert cgshim.config_backend() == backend
        return cgshim.op_sin(x) * w * w

    return op_host(f, outputs=lambda x, w: x, backend=backend)


@case()
def foreign_function(framework: Framework) -> None:
    for backend in _others(framework):
        framework.check(
            _op(backend), framework.tensor(X), framework.tensor(W), upstream=framework.tensor(UPSTREAM),
            output=np.sin(X) * W * W,
            gradients=(UPSTREAM * np.cos(X) * W * W, (UPSTREAM * np.sin(X) * 2 * W).sum()),
        )  # fmt: skip


@case()
def foreign_function_at_the_third_order(framework: Framework) -> None:
    x, w, upstream = framework.tensor(X), framework.tensor(W), framework.tensor(UPSTREAM)
    for backend in _others(framework):
        op = _op(backend)
        first = lambda x, w, op=op: cgshim.op_vjp(op, x, w)[1](upstream)[0]
        second = lambda x, w, first=first: cgshim.op_vjp(first, x, w)[1](upstream)[0]
        framework.check(
            first, x, w, upstream=upstream, output=UPSTREAM * np.cos(X) * W * W,
            gradients=(-(UPSTREAM**2) * np.sin(X) * W * W, (UPSTREAM**2 * np.cos(X) * 2 * W).sum()),
        )  # fmt: skip
        framework.check(
            second, x, w, upstream=upstream, output=-(UPSTREAM**2) * np.sin(X) * W * W,
            gradients=(-(UPSTREAM**3) * np.cos(X) * W * W, -(UPSTREAM**3 * np.sin(X) * 2 * W).sum()),
        )  # fmt: skip


@case()
def foreign_function_of_trees(framework: Framework) -> None:
    """Integers and what is no tensor have no gradient; options are static."""
    for backend in _others(framework):

        def f(params: Any, index: Any, kind: str, *, scale: float) -> Any:
            assert kind == "row"
            return {"y": scale * params["w"] * params["b"][index], "z": params["b"] * 2.0}

        op = op_host(f, outputs=lambda params, *rest: {"y": params["w"], "z": params["b"]}, backend=backend)
        params = {"w": framework.tensor([1.0, 2.0]), "b": framework.tensor([5.0, 3.0, 2.0])}
        index = framework.tensor(1, "int32")
        y, pullback = cgshim.op_vjp(lambda params, op=op, index=index: op(params, index, "row", scale=2.0), params)
        framework.check_equal(y, {"y": np.array([6.0, 12.0]), "z": np.array([10.0, 6.0, 4.0])})
        upstream = {"y": framework.tensor([1.0, -2.0]), "z": framework.tensor([1.0, 0.0, 7.0])}
        found = pullback(upstream)[0]
        framework.check_equal(found, {"w": np.array([6.0, -12.0]), "b": np.array([2.0, -6.0, 14.0])})


@case()
def foreign_framework_that_is_missing(framework: Framework) -> None:
    error = raised(BackendError, lambda: op_host(lambda x: x, outputs=lambda x: x, backend="nonesuch"))
    assert "nonesuch" in str(error)
