"""One call of a function on the host: what a backend gets, and runs with NumPy arrays."""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

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

    __slots__ = (
        "_options", "_takes_all", "also", "declares", "function", "name", "takes_sizes", "vectorized",
    )  # fmt: skip

    def __init__(
        self, function: Callable[..., Any], outputs: Any, *, vectorized: bool, name: str,
        also: tuple[Spec, ...] = (), takes_sizes: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(outputs, str):
            raise refusal(CustomGradientTypeError, name,
                          must="outputs must return the specs of what f returns", got=repr(outputs),
                          do="declare them, or call NumPy on op_convert_to_numpy(x) in an op_custom_gradient without "
                          "host_outputs, eagerly")  # fmt: skip
        self.function = function
        self.name = name
        self.vectorized = vectorized
        self.takes_sizes = takes_sizes
        """True if it is a partial of the sizes of the batches, which all arrays then have"""
        self.declares = outputs
        """the specs of the results, or the author's function of the arguments' specs that returns them"""
        self.also = also
        """the specs of what function returns beside these results, in a tuple"""
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
        return (outputs, *self.also) if self.also else outputs


def refuse_host_derivative(op: str) -> NoReturn:
    """Raise the error for the derivative of what a function on the host returned."""
    raise refusal(TransformationError, op, must="what runs on the host has no derivative of its own",
                  got="a derivative of its result",
                  do="call it within op_custom_gradient, and write the rule with ops that have one")  # fmt: skip


class HostCall:
    """A function on the host with its static arguments and options, over any number of batches.

    ``call.declared(backend, inputs)`` is known before it runs; ``call.run(arrays)`` runs it, and so
    does calling it. All work in any thread. Calls are equal if nobody can tell one from the other.
    """

    __slots__ = (
        "__weakref__", "_known", "are_tensors", "batches", "function", "name", "options", "specs",
    )  # fmt: skip

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
        self._known: tuple[Sequence[Spec], Sequence[Any], Any] | None = None
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
        sizes, tree = self._declaration(inputs)
        # to compare symbolic sizes would be to decide about them
        are_known = all(isinstance(size, int) for x in inputs for size in x.shape)
        self._known = (inputs, sizes, tree) if are_known else None
        return self._flat(backend, sizes, tree)

    def _declaration(self, inputs: Sequence[Spec]) -> tuple[Sequence[Any], Any]:
        """Return the sizes of the batches of these inputs, and what outputs returns for one element."""
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
        return sizes, self.function.outputs(args, self.options)

    def _flat(self, backend: Backend, sizes: Sequence[Any], tree: Any) -> tuple[list[Spec], Any]:
        """Return the specs of the results over batches, and their structure in a backend: None for
        one that is in no container.
        """
        if isinstance(tree, Spec):
            return [self._over_sizes(sizes, tree)], None
        leaves, structure = backend.tree_flatten(tree)
        return [self._over_sizes(sizes, leaf) for leaf in leaves], structure

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
            if known is None or not all(map(_is_like, inputs, known[0])):
                specs = list(map(spec_of, inputs))
                known = self._known = specs, *self._declaration(specs)
            _, sizes, tree = known
            declared, structure = self._flat(load("numpy"), sizes, tree)
            if 0 in sizes:  # there is no element to call f for
                results = [np.zeros(spec.shape) for spec in declared]
            else:
                results = on_numpy(_over_batches, self, list(map(locked, arrays)), sizes, structure)
            return [_checked(self, results, at, spec) for at, spec in enumerate(declared)], declared
        except Exception as error:
            last_errors.append(error)
            raise


def _is_like(x: Spec | Tensor | Array, spec: Spec) -> bool:
    return bool(x.shape == spec.shape) and dtype_name(x.dtype) == spec.dtype


last_errors: collections.deque[Exception] = collections.deque(maxlen=1)
"""the last error of a function on the host, in any thread: compiled code calls it in threads of its own"""


# --- On the host ----------------------------------------------------------------------------------


def _over_batches(
    call: HostCall, arrays: Sequence[Array], sizes: Sequence[int], structure: Any
) -> list[Array]:
    """Return the results over batches of these sizes: as one call of f if it is vectorized, else in
    a loop.
    """
    if not sizes:
        return _called(call, call.function.function, arrays, structure)
    wide = [
        np.expand_dims(x, [axis for axis, has in enumerate(batched) if not has])
        for x, *batched in zip(arrays, *reversed(call.batches), strict=True)
    ]
    if call.function.vectorized and not call.function.takes_sizes:
        return _called(call, call.function.function, wide, structure)
    wide = [np.broadcast_to(x, (*sizes, *x.shape[len(sizes) :])) for x in wide]
    if call.function.vectorized:
        of_batch = functools.partial(call.function.function.func, sizes)  # type: ignore[attr-defined]
        return _called(call, of_batch, wide, structure)
    # with an ellipsis, numbers too are arrays
    places: list[Any] = list(itertools.product(*map(range, sizes), [...]))
    columns = [map(x.__getitem__, places) for x in wide]
    function = call.function.function
    rows = [
        list(map(_copied, _called(call, function, row, structure)))
        for row in zip(*columns, strict=True)
    ]
    stacked = map(_stacked, zip(*rows, strict=True))
    return [results.reshape(*sizes, *results.shape[1:]) for results in stacked]


def _copied(result: Any) -> Any:
    """Return a result that f does not change in its next call, for which it may use the same array
    again.
    """
    return result if isinstance(result, _NUMBERS) else np.array(result)


def _stacked(rows: Sequence[Any]) -> Array:
    """Return arrays, or Python's numbers, as one array with a leading axis; numpy.stack is slow for
    many numbers.
    """
    return np.stack(rows) if np.ndim(rows[0]) else np.array(rows)


def _called(
    call: HostCall, function: Callable[..., Any], arrays: Sequence[Array], structure: Any
) -> list[Any]:
    """Return what f returns, flat."""
    try:
        args = arrays if call.are_tensors else combine_each(call.specs, arrays)
        result = function(*args, **call.options)
    except ValueError as error:
        if "read-only" in str(error):
            raise refusal(CustomGradientTypeError, call.name,
                          must="f must not write into its arguments, which others read",
                          got="a change in place", do="let it change a copy") from error  # fmt: skip
        raise
    if structure is None and isinstance(result, (np.ndarray, np.generic)):
        return [result]
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
