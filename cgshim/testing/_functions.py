"""Functions in the checker's form: named float tensors, with NumPy arrays in and out."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cgshim._dtypes import is_complex, is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    describe,
    describe_tree,
    refusal,
)
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import combine_each, partition, partition_each, subvals
from cgshim._registry import name_of
from cgshim._signature import Parameters
from cgshim._transforms import jvp_of

Array = Any


@dataclass(frozen=True, eq=False)
class Function:
    """A function of float and complex tensors that returns such tensors; calls use arrays.

    Its variables come first among the values, and each call writes to them.
    """

    backend: Backend
    on_tensors: Callable[..., Sequence[Tensor]]
    inputs: Sequence[str]
    """the name of each input in messages, variables first"""
    outputs: Sequence[str]
    variables: Sequence[Any]
    run: _Runner

    def __call__(self, values: Sequence[Array]) -> list[Array]:
        with self._set(values) as tensors:
            return self._arrays(self.run(self.on_tensors, *tensors))

    def vjp(
        self, values: Sequence[Array], upstreams: Sequence[Array], only: int | None = None
    ) -> list[Array]:
        """Return the gradients of all inputs in reverse mode; or of one, with zeros for the others."""
        with self._set(values) as tensors:
            if only is None:
                return self._arrays(self.run(self._pulled_back, tensors, self._tensors(upstreams)))
            at = only - len(self.variables)
            _, pullback = self.backend.vjp(
                lambda x: self.on_tensors(*subvals(tensors, [at], [x])), [tensors[at]]
            )
            # eager: a compiled call may need each gradient
            gradient = pullback(self._tensors(upstreams))
            return subvals(
                [np.zeros_like(value) for value in values], [only], self._arrays(gradient)
            )

    def jvp(self, values: Sequence[Array], tangents: Sequence[Array]) -> list[Array]:
        """Return the tangents of the outputs, by the framework's forward mode."""
        with self._set(values) as tensors:
            tangents = self._tensors(tangents[len(self.variables) :])
            return self._arrays(self.run(self._pushed_forward, tensors, tangents))

    def gradient(self) -> Function:
        """Return the function from inputs and upstream gradients to gradients."""
        count = len(self.inputs) - len(self.variables)
        upstreams = [f"the upstream gradient of {name}" for name in self.outputs]
        return Function(
            self.backend, lambda *tensors: self._pulled_back(tensors[:count], tensors[count:]),
            [*self.inputs, *upstreams], [f"the gradient of {name}" for name in self.inputs], self.variables, self.run,
        )  # fmt: skip

    def _pulled_back(self, tensors: Sequence[Tensor], upstreams: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the variables and of the other inputs."""
        if not self.variables:
            return list(self.backend.vjp(self.on_tensors, tensors)[1](upstreams))
        backend: Any = self.backend
        _, pullback = backend.vjp_with_variables(self.on_tensors, tensors, self.variables)
        gradients = pullback(upstreams)
        return [*gradients[len(tensors) :], *gradients[: len(tensors)]]

    def _pushed_forward(
        self, tensors: Sequence[Tensor], tangents: Sequence[Tensor]
    ) -> list[Tensor]:
        return list(jvp_of(self.backend)(self.on_tensors, tensors, tangents)[1])

    @contextlib.contextmanager
    def _set(self, values: Sequence[Array]) -> Iterator[list[Tensor]]:
        """Set the variables to the first of these values; yield the others as tensors."""
        count = len(self.variables)
        before = [self.backend.convert_to_numpy(variable).copy() for variable in self.variables]
        try:
            self._write(values[:count])
            yield self._tensors(values[count:])
        finally:
            self._write(before)

    def _write(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            _assign(variable, value)

    def has_conjugate_gradients(self) -> bool:
        """Return True if a complex gradient is the conjugate of the derivative (2j for z * z at
        1j).
        """
        at_1j, one = self._tensors([np.asarray(1j, "complex64"), np.asarray(1, "complex64")])
        _, pullback = self.backend.vjp(lambda z: [z * z], [at_1j])
        (gradient,) = self._arrays(pullback([one]))
        return bool(gradient.imag < 0)

    def _tensors(self, values: Sequence[Array]) -> list[Tensor]:
        return [self.backend.convert_to_tensor(value, value.dtype.name) for value in values]

    def _arrays(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [self.backend.convert_to_numpy(tensor) for tensor in tensors]


def _assign(variable: Any, value: Array) -> None:
    """Set trainable state to a value, by the framework's own way to write to it."""
    if hasattr(variable, "assign"):
        variable.assign(value)
    elif hasattr(variable, "requires_grad"):  # PyTorch: the copy must not be recorded
        variable.data.copy_(variable.data.new_tensor(value))
    else:
        raise refusal(CustomGradientTypeError, "check_gradients",
                      must="variables must be trainable state, which can be written to",
                      got=describe(variable), do="pass it as an argument")  # fmt: skip


SLOW = 0.5
"""seconds after which a function is slow: jax.jit takes less for most, eager JAX more for a scan"""


class _Runner:
    """Run functions of tensors, in jax.jit after a slow run: eager JAX recompiles each scan."""

    def __init__(self, backend: Backend) -> None:
        self._jit = importlib.import_module("jax").jit if name_of(backend) == "jax" else None
        self._compiled: dict[Any, Callable[..., Sequence[Tensor]]] = {}
        self._is_slow = False

    def __call__(self, fn: Callable[..., Sequence[Tensor]], *args: Any) -> Sequence[Tensor]:
        if self._jit and self._is_slow:
            if fn not in self._compiled:
                self._compiled[fn] = self._jit(fn)
            try:
                return self._compiled[fn](*args)
            except Exception:  # noqa: BLE001  # it reads values; any other is raised below
                self._jit = None
        start = time.perf_counter()
        result = fn(*args)
        self._is_slow |= time.perf_counter() - start > SLOW
        return result


def flatten(
    op: str,
    backend: Backend,
    fn: Callable[..., Any],
    args: Sequence[Any],
    argnums: int | Sequence[int] | None = None,
    variables: Sequence[Any] = (),
) -> tuple[Function, list[Array]]:
    """Return fn as a function of the variables and the float tensors in args, with their values.

    The tensors are in double precision if it exists. With argnums, tensors of other arguments are
    constants, in double precision too.
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
        raise refusal(CustomGradientTypeError, op, must="args must hold a float or complex tensor",
                      got=describe_tree(args), do="convert one")  # fmt: skip

    def output_at(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
        outputs, output = partition(
            op, backend, fn(*combine_each(specs, subvals(tensors, chosen, xs)), **options)
        )
        named = zip(outputs, output.paths("output"), strict=True)
        floats = [(y, path) for y, path in named if is_differentiable(y.dtype)]
        return [y for y, _ in floats], [path for _, path in floats]

    wide = [tensors[at] for at in chosen]
    _, outputs = output_at(wide)
    if not outputs:
        raise refusal(CustomGradientTypeError, op, must="the output must hold a float or complex tensor",
                      got="none", do="there is nothing to check")  # fmt: skip
    names = [*(f"variables[{at}]" for at in range(len(variables))), *(paths[at] for at in chosen)]
    function = Function(
        backend, lambda *xs: output_at(xs)[0], names, outputs, variables, _Runner(backend)
    )
    return function, [np.array(backend.convert_to_numpy(x)) for x in (*variables, *wide)]


def _positions(op: str, arguments: int, argnums: int | Sequence[int] | None) -> list[int]:
    if argnums is None:
        return list(range(arguments))
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    for number in numbers:
        if not (isinstance(number, int) and -arguments <= number < arguments):
            raise refusal(CustomGradientValueError, op,
                          must=f"argnums must name some of the {arguments} arguments", got=repr(number),
                          do="count from 0")  # fmt: skip
    return [number % arguments for number in numbers]


def _widened(backend: Backend, x: Tensor) -> Tensor:
    wide = "complex128" if is_complex(x.dtype) else "float64"
    try:
        return backend.convert_to_tensor(backend.convert_to_numpy(x), wide)
    except TypeError:  # a framework without this dtype
        return x


@contextlib.contextmanager
def double_precision(backend: Backend) -> Iterator[None]:
    """Enable float64 in a block: JAX needs its own switch, which is on only there."""
    if name_of(backend) != "jax":
        yield
        return
    jax = importlib.import_module("jax")
    # before JAX 0.8
    switch = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    with switch.enable_x64(True):
        yield
