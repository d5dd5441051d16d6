"""f and grad_fn on the host: both are NumPy code, and grad_fn may keep any Python object.

A rule cannot pass through a compiled program. So a run's number passes, and the host finds the rule
by it. If f ran eagerly the rule lives as long as its owner, else for the last few runs. If a rule
is gone, f runs again for it.
"""

from __future__ import annotations

import collections
import functools
import math
import random
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cgshim._call import checked_pair
from cgshim._dispatch import backend_or_numpy
from cgshim._foreign import is_traced, not_converted
from cgshim._gradients import Arguments
from cgshim._pytree import ONE_TENSOR, TreeSpec, combine_each, partition_each, with_leaves
from cgshim._registry import load
from cgshim._signature import Parameters
from cgshim.backend import Call, Rule, RuleScope, TransformationError, is_differentiable, refusal
from cgshim.host._call import Array, HostFunction, locked
from cgshim.host._op import host_op, of_object
from cgshim.host._specs import Spec, spec_of


class Run:
    """A run of f on the host: an object that holds it keeps its rule alive."""

    __slots__ = ("__weakref__",)


class Runs:
    """The rules of runs by number: rules that are held, and the last ones of compiled programs."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._rules: weakref.WeakKeyDictionary[Run, Rule] = weakref.WeakKeyDictionary()
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
        self._last: collections.OrderedDict[int, Run] = collections.OrderedDict()
        # random, so that a number of another process (a file, a pipe) is not found here
        self._next = random.SystemRandom().randrange(_NUMBERS)
        self._lock = threading.Lock()

    def add(self, rule: Rule, sizes: Sequence[int]) -> Any:
        """Return the number of a run with this rule; for a batch, one per element."""
        run = Run()
        with self._lock:
            number = self._next
            self._next = (self._next + max(math.prod(sizes), 1)) % _NUMBERS
            self._rules[run], self._runs[number] = rule, run
            if made_here.current is not None:
                made_here.current.append(run)
            else:
                self._last[number] = run
                if len(self._last) > self._keep:
                    self._last.popitem(last=False)
        return _numbers_from(number, sizes) if sizes else np.int32(number)

    def find(self, numbers: Array, inputs: Sequence[Array]) -> Rule | None:
        """Return the rule of the run with these numbers, on inputs like these; None if it is gone."""
        number = int(numbers.flat[0]) if numbers.size else -1
        with self._lock:
            run = self._runs.get(number)
            if number in self._last:
                self._last.move_to_end(number)
            rule = None if run is None else self._rules[run]
        is_for_all = not numbers.ndim or np.array_equal(
            numbers, _numbers_from(number, numbers.shape)
        )
        same = rule is not None and list(rule.shapes) == [x.shape for x in inputs]
        return rule if is_for_all and same else None


made_here: RuleScope[list[Run]] = RuleScope("cgshim_host_runs")
"""the runs that this thread makes meanwhile"""


@not_converted
class HostPair:
    """f of an op whose f and grad_fn are NumPy code."""

    binds_as_function = True
    has_one_order = True
    """the op has no second derivative"""
    declared_by = "host_outputs"

    def __init__(
        self,
        f: Callable[..., Any],
        outputs: Any,
        *,
        keep: int = 8,
        forward_mode: bool = False,
        vectorized: bool = False,
        name: str,
    ) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._name = name
        self._outputs = outputs
        self._parameters = Parameters(f)
        self._runs = Runs(keep)
        self._made_with: dict[str, Any] = {
            "keep": keep, "forward_mode": forward_mode, "vectorized": vectorized, "name": name,
        }  # fmt: skip

        def on_host(run: Callable[..., Any], outputs: Any, name: str, **options: Any) -> Any:
            return host_op(HostFunction(run, outputs, vectorized=vectorized, name=name,
                                        declared_by=self.declared_by, **options))  # fmt: skip

        self._forward = on_host(
            functools.partial(self._run_f, ()), outputs, name, numbers="returned"
        )
        self._backward: Callable[..., Any] = on_host(
            self._run_rule, declared_of_floats, f"the gradient of {name}", numbers="passed"
        )
        self._push: Callable[..., Any] | None = None
        """f's own jvp_fn, if the author promises that f returns one"""
        if forward_mode:
            self._push = on_host(
                self._run_jvp_fn,
                self._declared_tangents,
                f"the tangent of {name}",
                numbers="passed",
            )

    def __call__(self, /, *args: Any, **options: Any) -> tuple[Any, ...]:
        backend = backend_or_numpy(args)
        inputs, specs = partition_each(self._name, backend, args)
        options = self._parameters.default_options | options  # outputs may have parameters for them
        have_gradients = [is_differentiable(x.dtype) for x in inputs]
        # no derivative is taken of tensors that a rule covers
        constants = combine_each(specs, list(map(backend.stop_gradient, inputs)))
        runs: list[Run] = []
        if is_traced():  # torch.compile cannot trace a scope, and f does not run
            output, number = self._forward(*constants, **options)
        else:
            output, number = made_here.run(runs, self._forward, *constants, **options)
        # a list: a framework puts the number of each derivative level in it
        held: list[Any] = [number, runs]

        def grad_fn(*upstreams: Any, needs_input_grad: Any) -> list[Any]:
            flat = iter(self._backward(held[0], args, upstreams, needs_input_grad, **options))
            gradients = [next(flat) if has else None for has in have_gradients]
            return combine_each([spec.without_static() for spec in specs], gradients)

        def jvp_fn(*tangents: Any) -> Any:
            return self._push(held[0], args, tangents, **options)  # type: ignore[misc]

        return (output, grad_fn) if self._push is None else (output, grad_fn, jvp_fn)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """Return the function of an object, which is a static first argument without a gradient."""
        if instance is None or isinstance(self._f, staticmethod):
            return self
        return of_object(self._of_object, instance)

    def _of_object(self, instance: Any, /, *args: Any, **options: Any) -> tuple[Any, ...]:
        output, grad_fn, *_ = self(instance, *args, **options)
        return output, lambda *upstreams, needs_input_grad: grad_fn(
            *upstreams, needs_input_grad=(None, *needs_input_grad)
        )[1:]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments: the runs belong to this process."""
        return functools.partial(HostPair, **self._made_with), (self._f, self._outputs)

    # --- On the host ------------------------------------------------------------------------------

    def _run_f(self, sizes: Sequence[int], /, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Return f's output, and the number of this run, or one per element of a batch."""
        outputs, rule = self._run(*partition_each(self._name, load("numpy"), args), options)
        return rule.output.combine(outputs), self._runs.add(rule, sizes)

    def _run_rule(
        self,
        numbers: Any,
        args: Sequence[Any],
        upstreams: Sequence[Array],
        needed: Sequence[Any],
        /,
        **options: Any,
    ) -> list[Array]:
        """Return the gradients of the arguments that have one; needed is structured like them."""
        inputs, specs, rule = self._found(numbers, args, options)
        gradients, _ = rule(inputs, list(upstreams), needed=_flat(specs, needed))
        return [
            _or_zeros(gradient, x)
            for gradient, x in zip(gradients, inputs, strict=True)
            if is_differentiable(x.dtype)
        ]

    def _run_jvp_fn(
        self, numbers: Any, args: Sequence[Any], tangents: Sequence[Any], /, **options: Any
    ) -> Any:
        """Return the tangent of the output, with zeros for missing tangents."""
        inputs, specs, rule = self._found(numbers, args, options)
        if rule.jvp_fn is None:
            raise refusal(TransformationError, self._name,
                          must="forward mode on the host takes f's own jvp_fn",
                          got="a pair (output, grad_fn)", do="return (output, grad_fn, jvp_fn)")  # fmt: skip
        of_one = combine_each(specs, [Spec(x.shape[numbers.ndim :], x.dtype) for x in inputs])
        leaves, _ = load("numpy").tree_flatten(
            self._declared_tangents(numbers, of_one, (), **options)
        )
        declared = [Spec((*numbers.shape, *y.shape), y.dtype) for y in map(spec_of, leaves)]
        of_outputs = rule.tangents(
            _flat(specs, tangents), declared, lambda at: np.zeros_like(inputs[at])
        )
        return rule.output.combine([*map(_or_zeros, of_outputs, declared)])

    def _declared_tangents(
        self, number: Any, args: Sequence[Any], tangents: Sequence[Any], /, **options: Any
    ) -> Any:
        """Declare a tangent for each tensor of the output."""
        outputs, _ = self._forward.held_function.function.outputs(args, options)
        return outputs

    def _found(
        self, numbers: Any, args: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[list[Array], list[TreeSpec], Rule]:
        """Return the argument arrays, their specs, and the rule of the run with these numbers.

        f runs again if the rule is gone.
        """
        inputs, specs = partition_each(self._name, load("numpy"), args)
        rule = self._runs.find(numbers, inputs)
        if rule is None:
            _, rule = self._run(inputs, specs, options)
        return inputs, specs, rule

    def _run(
        self, inputs: Sequence[Array], specs: Sequence[TreeSpec], options: Mapping[str, Any]
    ) -> tuple[list[Array], Rule]:
        """Run f on copies of the arguments: its rule keeps them, and a framework may reuse memory."""
        count = len(specs)
        names = self._parameters.names_of(count) or [f"argument {at}" for at in range(count)]
        are_tensors = all(spec is ONE_TENSOR for spec in specs)
        arguments = Arguments(self._name, load("numpy"), names, specs, are_tensors)
        return Call(arguments, self._f_of_arrays, options)([locked(np.array(x)) for x in inputs])

    def _f_of_arrays(self, *args: Any, **options: Any) -> Any:
        """Return f's result, with arrays for Python numbers in its output."""
        output, grad_fn = checked_pair(self._name, self._f, self._f(*args, **options))
        as_result = lambda x: np.asarray(x) if isinstance(x, (bool, int, float, complex)) else x
        return with_leaves(load("numpy"), as_result, output), grad_fn


def _flat(specs: Sequence[TreeSpec], trees: Sequence[Any]) -> list[Any]:
    """Return the leaves of trees with these specs, one per tensor."""
    return [
        leaf for spec, tree in zip(specs, trees, strict=True) for leaf in spec.align(tree) or ()
    ]


def _or_zeros(derivative: Any, x: Any) -> Array:
    """Return a derivative with this shape and dtype, or zeros for None."""
    return np.zeros(x.shape, x.dtype) if derivative is None else derivative


_NUMBERS = 2**31 - 1


def _numbers_from(number: int, sizes: Sequence[int]) -> Array:
    """Return one number per element of a batch, in order."""
    return ((number + np.arange(math.prod(sizes))) % _NUMBERS).astype(np.int32).reshape(sizes)


def declared_of_floats(number: Any, args: Sequence[Any], upstreams: Any, needed: Any) -> list[Spec]:
    """Declare a gradient for each float or complex tensor in the arguments."""
    leaves = [
        leaf
        for arg in args
        for leaf in ([arg] if isinstance(arg, Spec) else load("numpy").tree_flatten(arg)[0])
    ]
    return [leaf for leaf in leaves if isinstance(leaf, Spec) and is_differentiable(leaf.dtype)]
