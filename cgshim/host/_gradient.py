"""f and grad_fn on the host: both are NumPy code, and what grad_fn keeps may be any Python object.

A rule cannot travel through a compiled program. So a number travels, and the host remembers whose
it is: as long as the rule's owner lives if f ran at once, else for the last few runs. If a rule is
gone, f runs again for it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from cgshim.backend import (
    ONE_TENSOR,
    Arguments,
    Backend,
    Call,
    Parameters,
    Rule,
    TransformationError,
    backend_or_numpy,
    checked_pair,
    combine_each,
    is_differentiable,
    load,
    partition,
    partition_each,
    refusal,
    with_leaves,
)
from cgshim.host._op import host_op
from cgshim.host._specs import Spec, spec_of

Array = Any
KEEP = 8
"""for how many runs compiled programs keep what grad_fn holds"""


class Run:
    """A run of f on the host: whoever holds it keeps its rule alive. A search of what grad_fn holds
    finds no more.
    """

    __slots__ = ("__weakref__",)


class Runs:
    """The rules of runs by their numbers: those that somebody holds, and the last ones of compiled
    programs.
    """

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self._rules: weakref.WeakKeyDictionary[Run, Rule] = weakref.WeakKeyDictionary()
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
        self._last: collections.OrderedDict[int, Run] = collections.OrderedDict()
        # not from 0: a number of another process, from a file or a pipe, must not be found here
        self._numbers = itertools.count(random.SystemRandom().randrange(_NUMBERS))
        self._lock = threading.Lock()
        self._thread = threading.local()

    def add(self, rule: Rule) -> int:
        """Return the number of a run with this rule."""
        run = Run()
        with self._lock:
            number = next(self._numbers) % _NUMBERS
            self._rules[run], self._runs[number] = rule, run
            made: list[Run] | None = getattr(self._thread, "made", None)
            if made is not None:
                made.append(run)
            elif self.keep:
                self._last[number] = run
                if len(self._last) > self.keep:
                    self._last.popitem(last=False)
        return number

    def find(self, number: int) -> Rule | None:
        """Return the rule of the run with this number; None if it is gone."""
        with self._lock:
            run = self._runs.get(number)
            if number in self._last:
                self._last.move_to_end(number)
            return None if run is None else self._rules[run]

    @contextlib.contextmanager
    def made_here(self) -> Iterator[list[Run]]:
        """Yield a list of the runs that this thread makes meanwhile; there are none if f is only
        traced.
        """
        before = getattr(self._thread, "made", None)
        made: list[Run] = []
        self._thread.made = made
        try:
            yield made
        finally:
            self._thread.made = before


class HostPair:
    """f of an op whose f and grad_fn are NumPy code."""

    autograph_info__: ClassVar[dict[str, Any]] = {}  # TensorFlow's AutoGraph calls it as it is

    def __init__(
        self,
        f: Callable[..., Any],
        outputs: Any,
        *,
        keep: int = KEEP,
        forward_mode: bool = False,
        name: str,
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._name = name
        self._outputs = outputs
        self._parameters = Parameters(f)
        self._runs = Runs(keep)
        self._forward = host_op(self._run_f, _with_number(outputs), name=name)
        self._backward: Callable[..., Any] = host_op(
            self._run_rule, declared_of_floats, name=f"the gradient of {name}"
        )
        self._push: Callable[..., Any] | None = None
        """f's own jvp_fn, where it is promised that f returns one"""
        if forward_mode:
            self._push = host_op(
                self._run_jvp_fn, self._declared_tangents, name=f"the tangent of {name}"
            )

    def __call__(self, /, *args: Any, **options: Any) -> tuple[Any, ...]:
        backend = backend_or_numpy(args)
        inputs, specs = partition_each(self._name, backend, args)
        have_gradients = [is_differentiable(x.dtype) for x in inputs]
        with self._runs.made_here() as runs:
            output, number = self._forward(*as_constants(backend, args), **options)
        # a list, in which a framework puts the number of each level of derivatives
        held: list[Any] = [number, runs]

        def grad_fn(*upstreams: Any, needs_input_grad: Any) -> list[Any]:
            number, _ = held
            found = iter(self._backward(number, args, upstreams, needs_input_grad, **options))
            gradients = [next(found) if has else None for has in have_gradients]
            return combine_each([spec.without_static() for spec in specs], gradients)

        if self._push is None:
            return output, grad_fn
        push, (outputs, structure) = self._push, partition(self._name, backend, output)
        structure = structure.without_static()
        have_tangents = [is_differentiable(y.dtype) for y in outputs]
        del outputs  # jvp_fn would keep them

        def jvp_fn(*tangents: Any) -> Any:
            number, _ = held
            found = iter(push(number, args, tangents, **options))
            return structure.combine([next(found) if has else None for has in have_tangents])

        return output, grad_fn, jvp_fn

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Return the function of an object: a static first argument, which has no gradient."""
        return self if instance is None else functools.partial(self._of_object, instance)

    def _of_object(self, instance: Any, /, *args: Any, **options: Any) -> tuple[Any, ...]:
        output, grad_fn, *_ = self(instance, *args, **options)
        return output, lambda *upstreams, needs_input_grad: grad_fn(
            *upstreams, needs_input_grad=(None, *needs_input_grad)
        )[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what makes it: its runs are those of this process."""
        forward_mode = self._push is not None
        return _restored, (self._f, self._outputs, self._runs.keep, self._name, forward_mode)

    # --- On the host ------------------------------------------------------------------------------

    def _run_f(self, /, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Return f's output, and the number of this run."""
        outputs, rule = self._run(args, options)
        return rule.output.combine(outputs), np.int32(self._runs.add(rule))

    def _run_rule(
        self,
        number: Any,
        args: Sequence[Any],
        upstreams: Sequence[Array],
        needed: Sequence[Any],
        /,
        **options: Any,
    ) -> list[Array]:
        """Return the gradients of the arguments that have one; needed is structured as they are."""
        inputs, specs = partition_each(self._name, load("numpy"), args)
        rule = self._runs.find(int(number))
        if rule is None or list(rule.shapes) != [x.shape for x in inputs]:
            _, rule = self._run(args, options)
        flags = [
            flag
            for spec, flags in zip(specs, needed, strict=True)
            for flag in spec.align(flags) or ()
        ]
        gradients, _ = rule(inputs, list(upstreams), needed=flags)
        pairs = zip(gradients, inputs, strict=True)
        return [
            np.zeros_like(x) if g is None else g for g, x in pairs if is_differentiable(x.dtype)
        ]

    def _run_jvp_fn(
        self, number: Any, args: Sequence[Any], tangents: Sequence[Any], /, **options: Any
    ) -> list[Array]:
        """Return the tangents of the outputs that have one."""
        inputs, specs = partition_each(self._name, load("numpy"), args)
        rule = self._runs.find(int(number))
        if rule is None or list(rule.shapes) != [x.shape for x in inputs]:
            _, rule = self._run(args, options)
        if rule.jvp_fn is None:
            raise refusal(TransformationError, self._name,
                          must="forward mode on the host takes f's own jvp_fn",
                          got="a pair (output, grad_fn)", do="return (output, grad_fn, jvp_fn)")  # fmt: skip
        given = [
            t for spec, tree in zip(specs, tangents, strict=True) for t in spec.align(tree) or ()
        ]
        declared = [*map(spec_of, self._declared(*args, **options))]
        found = rule.tangents(given, declared)
        pairs = zip(found, declared, strict=True)
        return [
            np.zeros(y.shape, y.dtype) if t is None else t
            for t, y in pairs
            if is_differentiable(y.dtype)
        ]

    def _declared(self, *args: Any, **options: Any) -> list[Spec]:
        """Return the specs of the outputs of f, of arguments or of their specs."""
        outputs = self._outputs
        if callable(outputs):
            outputs = outputs(*args, **options)
        leaves = [outputs] if isinstance(outputs, Spec) else load("numpy").tree_flatten(outputs)[0]
        return [leaf for leaf in leaves if hasattr(leaf, "dtype")]

    def _declared_tangents(
        self, number: Any, args: Any, tangents: Any, **options: Any
    ) -> list[Spec]:
        return [y for y in self._declared(*args, **options) if is_differentiable(y.dtype)]

    def _run(self, args: Sequence[Any], options: Mapping[str, Any]) -> tuple[list[Array], Rule]:
        """Run f on copies of the arguments: its rule keeps them, and a framework may use their
        memory again.
        """
        numpy = load("numpy")
        inputs, specs = partition_each(self._name, numpy, args)
        names = self._parameters.names_of(len(args)) or [
            f"argument {at}" for at in range(len(args))
        ]
        arguments = Arguments(
            self._name, numpy, names, specs, all(spec is ONE_TENSOR for spec in specs)
        )
        return Call(arguments, self._f_of_arrays, options)([_copy(x) for x in inputs])

    def _f_of_arrays(self, *args: Any, **options: Any) -> Any:
        """Return what f returns, with arrays for Python's numbers in its output: on the host these
        are results too.
        """
        output, grad_fn = checked_pair(self._name, self._f, self._f(*args, **options))
        if isinstance(output, np.ndarray):
            return output, grad_fn
        as_result = lambda x: np.asarray(x) if isinstance(x, (bool, int, float, complex)) else x
        return with_leaves(load("numpy"), as_result, output), grad_fn


def as_constants(backend: Backend, tree: Any) -> Any:
    """Return a tree with constants for its tensors: nobody differentiates what a rule speaks for."""

    def as_constant(x: Any) -> Any:
        return (
            backend.stop_gradient(x) if backend.is_tensor(x) and is_differentiable(x.dtype) else x
        )

    return with_leaves(backend, as_constant, tree)


def _restored(
    f: Callable[..., Any], outputs: Any, keep: int, name: str, forward_mode: bool = False
) -> HostPair:
    return HostPair(f, outputs, keep=keep, forward_mode=forward_mode, name=name)


def _copy(array: Array) -> Array:
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _with_number(outputs: Any) -> Callable[..., Any]:
    """Return what declares the results of f and the number of its run."""
    if not callable(outputs):
        return lambda *specs: (outputs, _NUMBER)

    @functools.wraps(outputs)
    def declared(*specs: Any, **options: Any) -> Any:
        return outputs(*specs, **options), _NUMBER

    return declared


_NUMBER = Spec((), "int32")  # JAX has no int64 by default
_NUMBERS = 2**31 - 1


def declared_of_floats(number: Any, args: Sequence[Any], upstreams: Any, needed: Any) -> list[Spec]:
    """Declare a gradient for each float or complex tensor in the arguments."""
    leaves = [
        leaf
        for arg in args
        for leaf in ([arg] if isinstance(arg, Spec) else load("numpy").tree_flatten(arg)[0])
    ]
    return [leaf for leaf in leaves if isinstance(leaf, Spec) and is_differentiable(leaf.dtype)]
