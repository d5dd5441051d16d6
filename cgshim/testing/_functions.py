"""Functions as the checker sees them: only float tensors, with a name for each, and NumPy arrays in and out."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgshim._dtypes import is_complex, is_differentiable
from cgshim._errors import CustomGradientTypeError, CustomGradientValueError, describe_tree, sentence
from cgshim._parameters import Parameters
from cgshim._protocol import Backend, Tensor
from cgshim._registry import name_of
from cgshim._trees import combine_each, partition, partition_each, subvals
from cgshim.testing._forward import jvp_of

Array = Any


@dataclass(frozen=True)
class Function:
    """A function of float and complex tensors that returns such tensors; calls take and return arrays."""

    backend: Backend
    on_tensors: Callable[..., Sequence[Tensor]]
    inputs: Sequence[str]
    """the name of each in messages"""
    outputs: Sequence[str]

    def __call__(self, values: Sequence[Array]) -> list[Array]:
        return self._arrays(self.on_tensors(*self._tensors(values)))

    def vjp(self, values: Sequence[Array], upstreams: Sequence[Array], alone: int | None = None) -> list[Array]:
        """Return the gradients of the inputs, by the framework's reverse mode; or of one alone, and zeros."""
        tensors = self._tensors(values)
        if alone is None:
            _, pullback = self.backend.vjp(self.on_tensors, tensors)
            return self._arrays(pullback(self._tensors(upstreams)))
        _, pullback = self.backend.vjp(lambda x: self.on_tensors(*subvals(tensors, [alone], [x])), [tensors[alone]])
        zeros = [np.zeros_like(value) for value in values]
        return subvals(zeros, [alone], self._arrays(pullback(self._tensors(upstreams))))

    def jvp(self, values: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """Return the tangents of the outputs, by the framework's forward mode."""
        return self._arrays(jvp_of(self.backend)(self.on_tensors, self._tensors(values), self._tensors(tangents)))

    def has_conjugate_gradients(self) -> bool:
        """Return True if a complex gradient is the conjugate of the derivative, which for z * z at 1j is 2j."""
        at_1j, one = self._tensors([np.asarray(1j, "complex64"), np.asarray(1, "complex64")])
        _, pullback = self.backend.vjp(lambda z: [z * z], [at_1j])
        (gradient,) = self._arrays(pullback([one]))
        return bool(gradient.imag < 0)

    def gradient(self) -> Function:
        """Return the function from inputs and upstream gradients to gradients."""

        def on_tensors(*tensors: Tensor) -> Sequence[Tensor]:
            inputs, upstreams = tensors[: len(self.inputs)], tensors[len(self.inputs) :]
            _, pullback = self.backend.vjp(self.on_tensors, inputs)
            return pullback(upstreams)

        upstreams = [f"the upstream gradient of {name}" for name in self.outputs]
        return Function(
            self.backend, on_tensors, [*self.inputs, *upstreams], [f"the gradient of {name}" for name in self.inputs]
        )

    def _tensors(self, values: Sequence[Array]) -> list[Tensor]:
        return [self.backend.convert_to_tensor(value, value.dtype.name) for value in values]

    def _arrays(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [self.backend.convert_to_numpy(tensor) for tensor in tensors]


def flatten(
    op: str,
    backend: Backend,
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int] | None = None,
) -> tuple[Function, list[Array]]:
    """Return fn as a function of the float tensors in args, and their values, in double precision if it exists.

    With argnums, only those in these arguments; the others stay as they are, in double precision too.
    """
    names, arguments, options = Parameters(fn).bind(op, tuple(args), {})
    tensors, specs = partition_each(op, backend, arguments)
    tensors = [_widened(backend, x) if is_differentiable(x.dtype) else x for x in tensors]
    paths = [path for name, spec in zip(names, specs, strict=True) for path in spec.paths(name)]
    numbers = _positions(op, len(arguments), argnums)
    owners = [at for at, spec in enumerate(specs) for _ in range(spec.count)]
    chosen = [
        at
        for at, (tensor, owner) in enumerate(zip(tensors, owners, strict=True))
        if is_differentiable(tensor.dtype) and owner in numbers
    ]
    if not chosen:
        raise CustomGradientTypeError(
            sentence(op, must="args must hold a float or complex tensor", got=describe_tree(args), do="convert one")
        )

    def output_at(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
        outputs, output = partition(op, backend, fn(*combine_each(specs, subvals(tensors, chosen, xs)), **options))
        named = zip(outputs, output.paths("output"), strict=True)
        floats = [(y, path) for y, path in named if is_differentiable(y.dtype)]
        return [y for y, _ in floats], [path for _, path in floats]

    wide = [tensors[at] for at in chosen]
    _, outputs = output_at(wide)
    if not outputs:
        raise CustomGradientTypeError(
            sentence(
                op, must="the output must hold a float or complex tensor", got="none", do="there is nothing to check"
            )
        )
    function = Function(backend, lambda *xs: output_at(xs)[0], [paths[at] for at in chosen], outputs)
    return function, [backend.convert_to_numpy(x) for x in wide]


def _positions(op: str, arguments: int, argnums: int | Sequence[int] | None) -> list[int]:
    if argnums is None:
        return list(range(arguments))
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not -arguments <= number < arguments:
            raise CustomGradientValueError(
                sentence(
                    op, must=f"argnums must name some of the {arguments} arguments", got=str(number), do="count from 0"
                )
            )
    return [number % arguments for number in numbers]


def _widened(backend: Backend, x: Tensor) -> Tensor:
    wide = "complex128" if is_complex(x.dtype) else "float64"
    try:
        return backend.convert_to_tensor(backend.convert_to_numpy(x), wide)
    except TypeError:  # a framework without that dtype
        return x


@contextlib.contextmanager
def double_precision(backend: Backend) -> Iterator[None]:
    """Enable float64 in a block: JAX has it only with its own switch, which is on only there."""
    if name_of(backend) != "jax":
        yield
        return
    jax = importlib.import_module("jax")
    switch = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")  # before JAX 0.8
    with switch.enable_x64(True):
        yield
