"""One call of a function on the host: what a backend gets, and runs with NumPy arrays."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from cgshim.backend import (
    ONE_TENSOR,
    Backend,
    CustomGradientTypeError,
    CustomGradientValueError,
    Tensor,
    TransformationError,
    TreeSpec,
    combine_each,
    describe,
    describe_tree,
    dtype_name,
    load,
    not_converted,
    on_numpy,
    refusal,
    told_apart,
)
from cgshim.host._specs import Spec, spec_of

Array = Any


class HostFunction:
    """A function of NumPy arrays, with what it declares to return: its outputs."""

    def __init__(
        self, function: Callable[..., Any], outputs: Any, *, vectorized: bool, name: str,
        numbers: Literal["returned", "passed"] | None = None,
    ) -> None:  # fmt: skip
        if isinstance(outputs, str):
            raise refusal(CustomGradientTypeError, name,
                          must="outputs must return the specs of what f returns", got=repr(outputs),
                          do="declare them, or call NumPy on op_convert_to_numpy(x) in an op_custom_gradient without "
                          "host_outputs, eagerly")  # fmt: skip
        self.function = function
        self.name = name
        self.vectorized = vectorized
        self.declares = outputs
        """the specs of the results, or the author's function of the arguments' specs that returns them"""
        self.numbers = numbers
        """whether function returns the numbers of a run beside these results, or is passed them as its first
        argument: then all arrays have the batches that it takes, whose sizes the former is told"""
        parameters = inspect.signature(outputs).parameters.values() if callable(outputs) else ()
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        self._options = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)

    def outputs(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Return the tree of the results' specs for arguments with specs for their tensors."""
        outputs = self.declares
        if callable(outputs):
            asked = {k: v for k, v in options.items() if self._takes_all or k in self._options}
            try:
                outputs = outputs(*args, **asked)
            except Exception as error:
                raise refusal(CustomGradientTypeError, self.name,
                              must="outputs must return the specs of what f returns",
                              got=f"{type(error).__name__}: {error}",
                              do="write outputs=lambda *specs: ..., which is given a Spec for each tensor"
                              ) from error  # fmt: skip
        return (outputs, NUMBER) if self.numbers == "returned" else outputs


NUMBER = Spec((), "int32")  # JAX has no int64 by default


def refuse_host_derivative(op: str) -> NoReturn:
    """Raise the error for the derivative of what a function on the host returned."""
    raise refusal(TransformationError, op, must="what runs on the host has no derivative of its own",
                  got="a derivative of its result",
                  do="call it within op_custom_gradient, and write the rule with ops that have one")  # fmt: skip


_Declaration = tuple[Sequence[Spec], Sequence[Any], list[Spec], Any]
"""the specs of inputs, the sizes of their batches, the specs of the results, and the tree of those of one element"""


class HostCall:
    """A function on the host with its static arguments and options, over any number of batches.

    ``call.declared(backend, inputs)`` is known before it runs; ``call.run(arrays)`` runs it, and so
    does calling it. All work in any thread. Calls are equal if nobody can tell one from the other.
    """

    def __init__(
        self,
        function: HostFunction,
        specs: Sequence[TreeSpec],
        options: Mapping[str, Any],
        batches: tuple[tuple[bool, ...], ...] = (),
    ) -> None:
        self.function = function
        self.name = function.name
        """the op's name in messages"""
        self.specs = specs
        self.are_tensors = all(spec is ONE_TENSOR for spec in specs)
        self.options = options
        self.batches = batches
        """for each batch, the innermost first, which inputs have a leading axis for it"""
        self._known: _Declaration | None = None
        """the last inputs and their declaration: f often runs next, and a compiled program runs it again"""

    def __repr__(self) -> str:
        return self.name

    @property
    def key(self) -> Hashable:
        """What tells this call from others, as long as it lives."""
        options = [(name, told_apart(option)) for name, option in sorted(self.options.items())]
        return self.function, tuple(spec.key for spec in self.specs), tuple(options), self.batches

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HostCall) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(repr(self.key))

    def over(self, batched: Sequence[bool]) -> HostCall:
        """Return the call over one more batch: a new leading axis of these inputs, and of every
        result.
        """
        return HostCall(
            self.function, self.specs, self.options, (*self.batches, tuple(map(bool, batched)))
        )

    def declared(self, backend: Backend, inputs: Sequence[Spec]) -> tuple[list[Spec], Any]:
        """Return the specs of the results for inputs of these specs, and the structure of the
        results. It asks outputs each time, which may read what has changed.
        """
        known, structure = self._declaration(backend, inputs)
        # to compare symbolic sizes would be to decide about them
        are_known = all(isinstance(size, int) for x in inputs for size in x.shape)
        self._known = known if are_known else None
        return known[2], structure

    def _declaration(self, backend: Backend, inputs: Sequence[Spec]) -> tuple[_Declaration, Any]:
        sizes: list[Any] = []
        one = inputs
        for batched in reversed(self.batches):
            sizes.append(
                next(x.shape[0] for x, has_axis in zip(one, batched, strict=True) if has_axis)
            )
            one = [
                Spec(x.shape[1:], x.dtype) if has else x
                for x, has in zip(one, batched, strict=True)
            ]
        args = one if self.are_tensors else combine_each(self.specs, one)
        tree = self.function.outputs(args, self.options)
        leaves, structure = ([tree], None) if isinstance(tree, Spec) else backend.tree_flatten(tree)
        declared = [self._over_sizes(sizes, leaf) for leaf in leaves]
        return (inputs, sizes, declared, tree), structure

    def _over_sizes(self, sizes: Sequence[Any], leaf: Any) -> Spec:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise refusal(CustomGradientTypeError, self.name,
                          must="outputs must return a tree of specs", got=f"{describe(leaf)} in it",
                          do="return cgshim.Spec(shape, dtype), or anything else with a shape and a dtype")  # fmt: skip
        spec = spec_of(leaf)
        return Spec((*sizes, *spec.shape), spec.dtype) if sizes else spec

    @not_converted
    def run(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the results for NumPy arrays: fresh arrays of the declared shapes and dtypes."""
        return self.run_for(arrays, arrays)[0]

    __call__ = run

    def run_for(
        self, inputs: Sequence[Tensor], arrays: Sequence[Array]
    ) -> tuple[list[Array], list[Spec]]:
        """Return the results for arrays that stand for these tensors, and what is declared for the
        tensors.
        """
        try:
            known = self._known
            # to make specs of the inputs would take longer than to compare them
            if known is None or not all(
                x.shape == spec.shape and dtype_name(x.dtype) == spec.dtype
                for x, spec in zip(inputs, known[0], strict=True)
            ):
                known, _ = self._declaration(load("numpy"), list(map(spec_of, inputs)))
                self._known = known
            _, sizes, declared, tree = known
            if 0 in sizes:  # there is no element to call f for
                results = [np.zeros(spec.shape) for spec in declared]
            else:
                structure = None if isinstance(tree, Spec) else load("numpy").tree_flatten(tree)[1]
                run = _over_batches if sizes else _called
                results = on_numpy(run, self, list(map(locked, arrays)), (), sizes, structure)
            return [_checked(self, results, at, spec) for at, spec in enumerate(declared)], declared
        except Exception as error:
            last_errors.append(error)
            raise


last_errors: collections.deque[Exception] = collections.deque(maxlen=1)
"""the last error of a function on the host, in any thread: compiled code calls it in threads of its own"""


# --- On the host ----------------------------------------------------------------------------------


def _over_batches(
    call: HostCall,
    arrays: Sequence[Array],
    taken: tuple[int, ...],
    sizes: Sequence[int],
    structure: Any,
) -> list[Array]:
    """Return the results over batches of these sizes, after those that f has taken: in a loop over
    those that it does not take.
    """
    size, *inner = sizes
    run = _over_batches if inner else _called
    axis, batched = len(taken), call.batches[len(inner)]
    # what is given numbers takes the batches of the runs
    if call.function.vectorized and (call.function.numbers != "passed" or batched[0]):
        wide = [
            x if has else np.expand_dims(x, axis) for x, has in zip(arrays, batched, strict=True)
        ]
        return run(call, wide, (*taken, size), inner, structure)
    every = [itertools.repeat(slice(None))] * axis
    # with an ellipsis, numbers too are arrays
    places = list(zip(*every, range(size), itertools.repeat(...)))
    columns = [
        map(x.__getitem__, places) if has else itertools.repeat(x, size)
        for x, has in zip(arrays, batched, strict=True)
    ]
    rows = [run(call, row, taken, inner, structure) for row in zip(*columns, strict=True)]
    # numpy.stack is slow for many numbers
    return [
        np.stack(results, axis) if np.ndim(results[0]) else np.array(results)
        for results in zip(*rows, strict=True)
    ]


def _called(
    call: HostCall,
    arrays: Sequence[Array],
    taken: tuple[int, ...],
    rest: Sequence[int],
    structure: Any,
) -> list[Any]:
    """Return what f returns, flat, for arrays with the batches that it has taken: the rest are none."""
    function = call.function.function
    if taken and call.function.numbers:
        arrays = [np.broadcast_to(x, (*taken, *x.shape[len(taken) :])) for x in arrays]
        if call.function.numbers == "returned":
            function = functools.partial(function.func, taken)  # type: ignore[attr-defined]
    try:
        args = arrays if call.are_tensors else combine_each(call.specs, arrays)
        result = function(*args, **call.options)
    except ValueError as error:
        if "read-only" in str(error):
            raise refusal(CustomGradientTypeError, call.name,
                          must="f must not write into its arguments, which others read",
                          got="a change in place", do="let it change a copy") from error  # fmt: skip
        raise
    if structure is None and isinstance(result, np.generic):
        return [result]
    is_array = structure is None and isinstance(result, np.ndarray)
    leaves = [result] if is_array else _leaves(call, result, structure)
    if len(taken) == len(call.batches):
        return leaves
    # f may use the same array again in its next call
    return [leaf if isinstance(leaf, _NUMBERS) else np.array(leaf) for leaf in leaves]


def _leaves(call: HostCall, result: Any, structure: Any) -> list[Any]:
    """Return the leaves of what f has returned, which is structured as declared."""
    leaves, returned = load("numpy").tree_flatten(result)
    declared = load("numpy").tree_flatten(_ARRAY)[1] if structure is None else structure
    if returned != declared:
        wanted = load("numpy").tree_unflatten(declared, [_ARRAY] * declared.num_leaves)
        raise refusal(CustomGradientTypeError, call.name,
                      must=f"f must return what outputs declares ({describe_tree(wanted)})", got=describe_tree(result),
                      do="declare what it returns")  # fmt: skip
    return leaves


_NUMBERS = (np.generic, bool, int, float, complex)
_ARRAY = type("array", (), {})()
"""in messages: any array"""


def locked(array: Array) -> Array:
    """Return an array in C order that cannot be written to."""
    array = np.asarray(array, order="C").view()
    array.setflags(write=False)
    return array


def _checked(call: HostCall, results: list[Any], at: int, spec: Spec) -> Array:
    """Return a result as a fresh array of the declared shape and dtype; f may use its own again."""
    array, results[at] = results[at], None
    dtype = _dtype_of(spec.dtype)
    if type(array) is np.ndarray:
        alone = np.empty(0)  # held as the result is: by one variable, and by whatever runs this
        is_fresh = sys.getrefcount(array) == sys.getrefcount(alone) and _is_own(array)
    else:
        array, is_fresh = np.asarray(array), isinstance(array, _NUMBERS)
    if is_fresh and array.shape == spec.shape and array.dtype == dtype:
        return array
    if call.function.vectorized and array.ndim == len(spec.shape):
        # a size of 1 is that of a batch that no argument has
        wide = spec.shape[: len(call.batches)] + array.shape[len(call.batches) :]
        if all(size in (1, wanted) for size, wanted in zip(array.shape, wide, strict=True)):
            array = np.broadcast_to(array, wide)
    if array.shape != spec.shape:
        raise refusal(CustomGradientValueError, call.name,
                      must=f"f must return an array of the declared shape {spec}", got=describe(array),
                      do="declare the shape that it returns")  # fmt: skip
    if array.dtype.kind == "c" and dtype.kind != "c":
        raise refusal(CustomGradientValueError, call.name,
                      must=f"f must return a real array as declared ({spec})", got=describe(array),
                      do="declare a complex dtype, or take the real part")  # fmt: skip
    return np.array(array, dtype, order="C")


def _is_own(array: Array) -> bool:
    """Return True if an array has its memory to itself, in C order, and may be written to."""
    return bool(array.flags.owndata and array.flags.c_contiguous and array.flags.writeable)


@functools.cache
def _dtype_of(name: str) -> Any:
    """Return the dtype of this name; without ml_dtypes NumPy has none for bfloat16, which float32
    holds.
    """
    try:
        return np.dtype(name)
    except TypeError:
        if name != "bfloat16":
            raise
        return np.dtype("float32")
