"""Batching rules: run an op for a whole batch where the framework cannot map f.

Where vmap maps the op, cgshim calls the batching rule once for the batch, as f of another op. The
grad_fn that the batching rule returns is for the whole batch.

A vmap around a derivative maps the derivative of one element. So f, its gradient and the gradient's
gradient each run for one element, or for a batch by the batching rule's derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from cgshim._call import Call
from cgshim._closure import FunctionHolder
from cgshim._dtypes import is_differentiable
from cgshim._errors import (
    CustomGradientTypeError,
    CustomGradientValueError,
    TransformationError,
    describe,
    describe_tree,
    refusal,
    shape_of,
)
from cgshim._foreign import not_converted
from cgshim._gradients import Arguments
from cgshim._protocol import Backend, Tensor
from cgshim._pytree import ONE_TENSOR, TreeSpec, partition, subvals
from cgshim._registry import name_of
from cgshim._rule import Rule


@not_converted  # AutoGraph converts only f
class WithBatches(FunctionHolder):
    """f of an op with a batching rule: f itself, unless vmap maps the op."""

    def __init__(self, f: Callable[..., Any], rule: Callable[..., Any]) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._rule = rule

    def __call__(self, /, *args: Any, **options: Any) -> Any:
        return self._f(*args, **options)

    def with_function(self, f: Callable[..., Any]) -> WithBatches:
        """Return the same batching rule with another f."""
        return WithBatches(f, self._rule)

    def __get__(self, instance: Any, owner: type | None = None) -> WithBatches:
        """Bind f and its batching rule to an object."""
        f, rule = [
            each.__get__(instance, owner) if hasattr(each, "__get__") else each
            for each in (self._f, self._rule)
        ]
        return self if f is self._f else WithBatches(f, rule)

    def __eq__(self, other: object) -> bool:
        """Return True for the same object, or for the same method of the same object."""
        return isinstance(other, WithBatches) and (self._f, self._rule) == (other._f, other._rule)

    def __hash__(self) -> int:
        return hash((self._f, self._rule))

    def __reduce__(self) -> tuple[Any, ...]:
        return WithBatches, (self._f, self._rule)

    def mapped(
        self, call: Call, inputs: Sequence[Tensor], f: Callable[..., Any] | None = None
    ) -> Any:
        """Return the output of a call that vmap may map, now or later in compiled code.

        f may be a version that AutoGraph converted.
        """
        specs: list[TreeSpec] = []

        def run(size: int | None, batched: Sequence[bool], *tensors: Tensor) -> Any:
            flags: list[Any] = [True]

            def f_of_batch(*args: Any, **options: Any) -> tuple[Any, Any]:
                in_batched = call.arguments.structured(batched)
                result = self._rule(size, in_batched, *args, **options)
                if not (isinstance(result, tuple) and len(result) == 3 and callable(result[1])):
                    raise refusal(CustomGradientTypeError, call.name,
                                  must="the rule for batches must return a triple (output, grad_fn, out_batched)",
                                  got=describe_tree(result),
                                  do="return the output for the batch, its grad_fn, and what of the "
                                  "output has the batch")  # fmt: skip
                output, grad_fn, flags[0] = result
                return output, grad_fn

            one_or_many = f or self._f if size is None else f_of_batch
            output = call.backend.custom_gradient(call.with_f(one_or_many), tensors)
            outputs, spec = partition(call.name, call.backend, output)
            specs.append(spec)
            return outputs, _which_have_batch(call.name, size, flags[0], outputs, spec)

        outputs = Mapped(call, run, len(inputs)).output(inputs)
        return specs[-1].combine(outputs)


def require_batches(op: str, backend: Backend) -> None:
    """Raise an error if the backend would not call a batching rule."""
    if not hasattr(backend, "mapped"):
        raise refusal(TransformationError, op,
                      must="a rule for batches needs a backend that calls it",
                      got=f"{name_of(backend)}, which does not", do="leave out vmap=")  # fmt: skip


def _which_have_batch(
    op: str, size: int | None, flags: Any, outputs: Sequence[Tensor], spec: TreeSpec
) -> list[bool]:
    """Return for each output tensor whether its first axis is the batch, from out_batched."""
    have = [flags] * len(outputs) if isinstance(flags, bool) else spec.align(flags)
    if have is None or not all(isinstance(flag, bool) for flag in have):
        raise refusal(CustomGradientTypeError, op,
                      must="out_batched must be a bool, or bools structured as the output",
                      got=describe_tree(flags), do="return True if all of the output has the batch")  # fmt: skip
    for at, (y, has) in enumerate(zip(outputs, have, strict=True)):
        first = shape_of(y.shape)[:1]
        if isinstance(size, int) and has and first not in ((size,), (None,), (...,)):
            raise refusal(CustomGradientValueError, op,
                          must=f"{spec.path('the output', at)} must have the batch of {size} for its first axis",
                          got=describe(y), do="say in out_batched that it has none")  # fmt: skip
    return have


class _CallOfMapped(Call):
    __slots__ = ()

    def require_variables(self, rule: Rule, variables: Sequence[Tensor]) -> None:
        """Raise an error if f reads variables, because vmap maps only arguments."""
        if variables:
            self.refuse_undeclared(variables)

    def refuse_undeclared(self, tensors: Sequence[object]) -> NoReturn:
        """Raise the error for captured tensors, declared or not."""
        self.refuse_captured(tensors[0])


@not_converted
class Mapped:
    """A function of tensors, f or its derivative, that runs for one element or for a batch."""

    def __init__(
        self, call: Call, run: Callable[..., Any], count: int, in_batch: Sequence[int] = ()
    ) -> None:
        names = [f"input {at}" for at in range(count)]
        self._arguments = Arguments(call.name, call.backend, names, [ONE_TENSOR] * count, True)
        self._of = call
        self.run = run
        """``run(size, batched, *inputs)`` returns the outputs, and which outputs have the batch as
        their first axis. ``batched`` says the same of the inputs. For one element the size is None.
        """
        self.in_batch = in_batch
        """which inputs always have the batch"""

    @property
    def call(self) -> Call:
        """The call that this function belongs to."""
        return _CallOfMapped(self._arguments, self, {}, forward_mode=self._of.forward_mode,
                             once_differentiable=self._of.once_differentiable)  # fmt: skip

    def output(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs; vmap maps their derivative too."""
        outputs: list[Tensor] = self._of.backend.custom_gradient(self.call, inputs)
        return outputs

    def __call__(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the outputs and the derivatives."""
        backend: Any = self._of.backend
        outputs = backend.mapped(self, inputs)
        count, ends = (
            len(outputs),
            [at for at, y in enumerate(outputs) if is_differentiable(y.dtype)],
        )

        @not_converted
        def grad_fn(*upstreams: Tensor, needs_input_grad: Sequence[bool]) -> list[Tensor | None]:
            wanted = [at for at, is_needed in enumerate(needs_input_grad) if is_needed]
            gradient = self._derivative(len(inputs), wanted, ends, forward=False)
            gradients = gradient.output([*inputs, *[upstreams[at] for at in ends]])
            return subvals([None] * len(inputs), wanted, gradients)

        @not_converted
        def jvp_fn(*tangents: Tensor | None) -> list[Tensor | None]:
            wanted = [at for at, t in enumerate(tangents) if t is not None]
            derivative = self._derivative(len(inputs), wanted, ends, forward=True)
            tangents_out = derivative.output([*inputs, *[tangents[at] for at in wanted]])
            return subvals([None] * count, ends, tangents_out)

        return (outputs, grad_fn, jvp_fn) if self._of.forward_mode else (outputs, grad_fn)

    def _derivative(
        self, count: int, wanted: Sequence[int], ends: Sequence[int], *, forward: bool
    ) -> Mapped:
        """Return the derivative of these outputs by the wanted inputs.

        It is a function of all inputs and of upstreams, or of tangents in forward mode.
        """
        backend: Any = self._of.backend
        vjp = getattr(backend, "vjp_of_rules", backend.vjp)

        def run(size: int | None, batched: Sequence[bool], *tensors: Tensor) -> Any:
            have: list[bool] = []

            def outputs_of(*moving: Tensor) -> list[Tensor]:
                inputs = subvals(tensors[:count], wanted, moving)
                outputs, have[:] = self.run(size, batched[:count], *inputs)
                # an output without the batch does not depend on batched inputs
                return [outputs[at] for at in ends if forward or have[at]]

            outputs, pullback = vjp(outputs_of, [tensors[at] for at in wanted])
            vectors = tensors[count:]
            if forward:
                linear = lambda *upstreams: pullback(upstreams)
                refuse = self._of.refuse_nonlinear
                return backend.transposed(linear, outputs, vectors, refuse), [
                    have[at] for at in ends
                ]
            upstreams = [u for u, at in zip(vectors, ends, strict=True) if have[at]]
            return pullback(upstreams), [True] * len(wanted)

        total = count + len(wanted if forward else ends)
        return Mapped(self._of, run, total, [*self.in_batch, *wanted, *range(count, total)])
