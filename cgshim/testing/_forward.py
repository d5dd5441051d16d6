"""Forward mode by each framework's own mechanism."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from cgshim._errors import BackendError, refusal
from cgshim._protocol import Backend, Tensor
from cgshim._registry import name_of

Function = Callable[..., Sequence[Tensor]]
Jvp = Callable[[Function, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""`jvp(fn, inputs, tangents)` returns the tangents of fn's outputs; all are float or complex."""


def jvp_of(backend: Backend) -> Jvp:
    """Return the framework's forward mode: `jvp` of its backend, or else our own for the four
    frameworks.
    """
    name = name_of(backend)
    jvp: Jvp | None = getattr(backend, "jvp", None) or _JVPS.get(name)
    if jvp is None:
        raise refusal(BackendError, "check_gradients",
                      must=f"forward mode needs jvp(fn, inputs, tangents) in the backend {name!r}",
                      got="none", do='write it, or check modes=("reverse",)')  # fmt: skip
    return jvp


def _autograd_jvp(
    fn: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    core, builtins = (
        importlib.import_module("autograd.core"),
        importlib.import_module("autograd.builtins"),
    )
    # The inputs come back with the outputs: the tangent of an output that does not depend on them
    # is then known.
    jvp = core.make_jvp(
        lambda xs: builtins.tuple((builtins.tuple(tuple(fn(*xs))), xs)), tuple(inputs)
    )
    _, (of_outputs, _) = jvp(tuple(tangents))
    return list(of_outputs)


def _jax_jvp(
    fn: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    jax = importlib.import_module("jax")
    _, of_outputs = jax.jvp(lambda *xs: list(fn(*xs)), list(inputs), list(tangents))
    return list(of_outputs)


def _torch_jvp(
    fn: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    torch = importlib.import_module("torch")
    _, of_outputs = torch.func.jvp(lambda *xs: tuple(fn(*xs)), tuple(inputs), tuple(tangents))
    return list(of_outputs)


def _tensorflow_jvp(
    fn: Function, inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> Sequence[Tensor]:
    tf = importlib.import_module("tensorflow")
    with tf.autodiff.ForwardAccumulator(list(inputs), list(tangents)) as accumulator:
        outputs = list(fn(*inputs))
    return list(accumulator.jvp(outputs, unconnected_gradients=tf.UnconnectedGradients.ZERO))


_JVPS: dict[str, Jvp] = {
    "jax": _jax_jvp,
    "numpy": _autograd_jvp,
    "tensorflow": _tensorflow_jvp,
    "torch": _torch_jvp,
}
