"""A batching rule is called where the framework maps an op, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cgshim import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    op_custom_gradient,
    op_vjp,
    ops,
)
from cgshim._protocol import Tensor
from cgshim._registry import name_of
from cgshim.testing._batches import vmap_of
from cgshim.testing.conformance._framework import Framework, raised
from cgshim.testing.conformance._registry import case

XS = np.array([[1.0, -2.0], [3.0, 0.5], [-1.5, 2.0]])
WS = np.array([2.0, -3.0, 5.0])
US = np.array([[1.0, 10.0], [-2.0, 3.0], [0.5, -4.0]])


def _op(**options: Any) -> tuple[Any, list[Any]]:
    """Return an op of a vector and a number, and a list of its batching rule's arguments.

    Its gradients are wrong on purpose. Other factors over a batch show which rule ran.
    """
    seen: list[Any] = []

    def over_batch(size: int, in_batched: tuple[bool, bool], x: Tensor, w: Tensor) -> Any:
        seen.append((size, in_batched))
        x_is, w_is = in_batched
        column = ops.reshape(w, (-1, 1))

        def grad(upstream: Tensor) -> Any:
            of_x = 70.0 * upstream * column + 0.0 * x
            of_w = 110.0 * ops.sum(upstream * x, axis=-1)
            return of_x if x_is else ops.sum(of_x, axis=0), of_w if w_is else ops.sum(of_w)

        return 10.0 * x * column, grad, True

    @op_custom_gradient(vmap=over_batch, **options)
    def scaled(x: Tensor, w: Tensor) -> Any:
        return x * w, lambda u: (7.0 * u * w, 11.0 * ops.sum(u * x))

    return scaled, seen


def _is_refused(framework: Framework, fn: Any, *args: Any) -> bool:
    """Return True if the backend lacks `mapped`; check that it then raises an error."""
    if hasattr(framework.backend, "mapped"):
        return False
    error = raised(TransformationError, fn, *args)
    assert str(error) == (
        f"scaled: a rule for batches needs a backend that calls it, got {name_of(framework.backend)}, which does not; "
        "leave out vmap="
    )
    return True


@case()
def rule_for_batches_beside_one_element(framework: Framework) -> None:
    scaled, seen = _op()
    x, w = framework.tensors((XS[0], WS[0]))
    if _is_refused(framework, scaled, x, w):
        return
    gradients = (7 * US[0] * WS[0], 11 * (US[0] * XS[0]).sum())
    framework.check_at(
        scaled, XS[0], WS[0], upstream=US[0], output=XS[0] * WS[0], gradients=gradients
    )
    assert seen == []


def _expected(batched: Sequence[bool]) -> tuple[Any, Any, Any]:
    """Return the inputs, the outputs and the gradients of the batching rule."""
    x, w = (XS if batched[0] else XS[0]), (WS if batched[1] else WS[0])
    column = np.reshape(w, (-1, 1))
    of_x, of_w = 70 * US * column, 110 * (US * x).sum(-1)
    return (
        (x, w),
        10 * x * column,
        (of_x if batched[0] else of_x.sum(0), of_w if batched[1] else of_w.sum()),
    )


BATCHED = {"both": (True, True), "x": (True, False), "w": (False, True)}


@case(batched=BATCHED)
def gradient_of_a_batch(framework: Framework, batched: tuple[bool, bool]) -> None:
    """The rule runs once, for the batch; it sums gradients of arguments without the batch."""
    scaled, seen = _op()
    vmap = vmap_of(framework.backend)
    if vmap is None or not hasattr(framework.backend, "mapped"):
        return
    inputs, output, gradients = _expected(batched)
    actual, pullback = op_vjp(
        lambda *xs: vmap(lambda *xs: [scaled(*xs)], batched, xs)[0], *framework.tensors(inputs)
    )
    framework.check_equal(actual, output)
    framework.check_equal(pullback(framework.tensor(US)), gradients)
    assert seen == [(3, batched)]


@case(batched=BATCHED)
def gradients_of_the_elements_of_a_batch(framework: Framework, batched: tuple[bool, bool]) -> None:
    """Each element has its own gradient: all differentiated arguments have the batch."""
    scaled, seen = _op()
    vmap = vmap_of(framework.backend)
    if vmap is None or not hasattr(framework.backend, "mapped"):
        return
    inputs, _, _ = _expected(batched)
    x, w = (
        np.broadcast_to(each, shape)
        for each, shape in zip(inputs, (XS.shape, WS.shape), strict=True)
    )
    of_one = lambda x, w, u: list(op_vjp(scaled, x, w)[1](u))
    gradients = vmap(of_one, (*batched, True), framework.tensors((*inputs, US)))
    framework.check_equal(tuple(gradients), (70 * US * w[:, None], 110 * (US * x).sum(-1)))
    assert all(size == 3 for size, _ in seen)
    assert seen[-1][1] == (True, True)


MISTAKES = {
    "no triple": (
        CustomGradientTypeError,
        "op: the rule for batches must return a triple (output, grad_fn, out_batched), got (f32[3,2], function); "
        "return the output for the batch, its grad_fn, and what of the output has the batch",
        lambda size, in_batched, x: (x, lambda u: u),
    ),
    "another size": (
        CustomGradientValueError,
        "op: the output must have the batch of 3 for its first axis, got f32[2]; say in out_batched that it has none",
        lambda size, in_batched, x: (ops.sum(x, axis=0), lambda u: x, True),
    ),
    "out_batched of another structure": (
        CustomGradientTypeError,
        "op: out_batched must be a bool, or bools structured as the output, got (bool, bool); "
        "return True if all of the output has the batch",
        lambda size, in_batched, x: (x, lambda u: u, (True, False)),
    ),
}


@case(mistake=MISTAKES)
def mistakes_in_a_rule_for_batches(framework: Framework, mistake: tuple[Any, str, Any]) -> None:
    kind, message, rule = mistake
    vmap = vmap_of(framework.backend)
    if vmap is None or not hasattr(framework.backend, "mapped"):
        return
    op = op_custom_gradient(lambda x: (x, lambda u: u), vmap=rule, name="op")
    error = raised(kind, vmap, lambda x: [op(x)], [True], [framework.tensor(XS)])
    assert message in str(error)  # TensorFlow's has a traceback around it
