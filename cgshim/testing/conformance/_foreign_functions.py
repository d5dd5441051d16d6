"""Functions of another framework's tensors, with that framework's derivatives of every order."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import cgshim
from cgshim import BackendError, op_host
from cgshim._registry import load
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

X, W, UPSTREAM = np.array([1.0, 2.0, 4.0]), 3.0, np.array([1.0, -2.0, 5.0])


def other_frameworks(framework: Framework) -> list[str]:
    """The other frameworks of this run, always with NumPy."""
    return [
        name
        for name in cgshim.available_backends()
        if name != framework.name and name in sys.modules
    ]


def _op(backend: str) -> Any:
    """sin(x) w w, by the ops of a backend."""

    def f(x: Any, w: Any) -> Any:
        assert load(backend).is_tensor(x)
        assert cgshim.config_backend() == backend
        return cgshim.op_sin(x) * w * w

    return op_host(f, outputs=lambda x, w: x, backend=backend)


@case()
def foreign_function(framework: Framework) -> None:
    for backend in other_frameworks(framework):
        of_x, of_w = UPSTREAM * np.cos(X) * W * W, (UPSTREAM * np.sin(X) * 2 * W).sum()
        framework.check_at(
            _op(backend), X, W, upstream=UPSTREAM, output=np.sin(X) * W * W, gradients=(of_x, of_w)
        )


@case()
def foreign_function_at_the_third_order(framework: Framework) -> None:
    upstream = framework.tensor(UPSTREAM)
    u_cos, uu_sin, uuu_cos = UPSTREAM * np.cos(X), UPSTREAM**2 * np.sin(X), UPSTREAM**3 * np.cos(X)
    for backend in other_frameworks(framework):
        op = _op(backend)
        first = lambda x, w, op=op: cgshim.op_vjp(op, x, w)[1](upstream)[0]
        second = lambda x, w, first=first: cgshim.op_vjp(first, x, w)[1](upstream)[0]
        gradients = -uu_sin * W * W, (UPSTREAM * u_cos * 2 * W).sum()
        framework.check_at(
            first, X, W, upstream=UPSTREAM, output=u_cos * W * W, gradients=gradients
        )
        gradients = -uuu_cos * W * W, -(UPSTREAM * uu_sin * 2 * W).sum()
        framework.check_at(
            second, X, W, upstream=UPSTREAM, output=-uu_sin * W * W, gradients=gradients
        )


@case()
def foreign_function_of_trees(framework: Framework) -> None:
    """Integers and static leaves have no gradient; options are static."""
    index = framework.tensor(1, "int32")

    def f(params: Any, index: Any, kind: str, *, scale: float) -> Any:
        assert kind == "row"
        return {"y": scale * params["w"] * params["b"][index], "z": params["b"] * 2.0}

    for backend in other_frameworks(framework):
        op = op_host(
            f, outputs=lambda params, *rest: {"y": params["w"], "z": params["b"]}, backend=backend
        )
        framework.check_at(
            lambda params, op=op: op(params, index, "row", scale=2.0),
            {"w": np.array([1.0, 2.0]), "b": np.array([5.0, 3.0, 2.0])},
            upstream={"y": np.array([1.0, -2.0]), "z": np.array([1.0, 0.0, 7.0])},
            output={"y": np.array([6.0, 12.0]), "z": np.array([10.0, 6.0, 4.0])},
            gradients=({"w": np.array([6.0, -12.0]), "b": np.array([2.0, -6.0, 14.0])},),
        )


@case()
def foreign_framework_that_is_missing(framework: Framework) -> None:
    error = raised(
        BackendError, lambda: op_host(lambda x: x, outputs=lambda x: x, backend="nonesuch")
    )
    assert "nonesuch" in str(error)
