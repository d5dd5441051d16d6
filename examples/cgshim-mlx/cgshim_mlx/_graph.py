"""MLX: the graph behind an array, read from what MLX writes of it, for it tells nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

import mlx.core as mx

from cgshim_mlx._arrays import Array


def is_traced(x: Array) -> bool:
    """Whether a derivative began behind x."""
    return Graph(x).has_a_derivative()


def is_one_array(x: Array, other: Array) -> bool:
    """Whether nothing was done to x in place since other was made of it."""
    return Graph(x, [other]).is_an_input


class Graph:
    """The graph behind an array, read from what MLX writes of it: which operation made each array, and of what."""

    def __init__(self, x: Array, inputs: Sequence[Array] = ()) -> None:
        written = io.StringIO()
        named = {f"input{at}": each for at, each in enumerate(inputs)}
        mx.export_to_dot(written, x, output=x, **named)
        text = written.getvalue()
        self.is_an_input = '"output"' not in text  # an array has one name, the last one
        self.labels: dict[str, str] = dict(re.findall(r"(\d+) \[label =\"(\w+)\"", text))
        self.producers = {array: made_by for made_by, array in re.findall(r'(\d+) -> "(\w+)"', text)}
        self.made_of: dict[str, list[str]] = {}
        for array, operation in re.findall(r'"(\w+)" -> (\d+)', text):
            self.made_of.setdefault(operation, []).append(array)

    def is_made_of_inputs(self) -> bool:
        """Whether whatever is in this graph is made of inputs; another array at its beginning may belong to mx.vmap."""
        return self.is_an_input or all(array.startswith("input") for array in self._beginnings())

    def has_a_derivative(self) -> bool:
        """Whether a derivative began in this graph, where MLX makes a copy of an array."""
        return any(self._label(array) == "Copy" for array in self._beginnings())

    def _beginnings(self) -> Iterator[str]:
        """The inputs, the arrays that no operation has made, and those with which a derivative began."""
        todo, seen = ["output"], set[str]()
        while todo:
            array = todo.pop()
            label = self._label(array)
            if array in seen or label == "StopGradient":
                continue
            seen.add(array)
            if array.startswith("input") or label in (None, "Copy"):
                yield array
            else:
                todo += self.made_of[self.producers[array]]

    def _label(self, array: str) -> str | None:
        return self.labels.get(self.producers.get(array, ""))

    def nonlinear_operation(self) -> str | None:
        """What in this graph is seen not to be linear in the inputs; None where everything may be."""
        if self.is_an_input:
            return None
        depends: dict[str, bool] = {}
        todo = ["output"]
        while todo:
            array = todo[-1]
            parts = self.made_of.get(self.producers.get(array, ""), [])
            unknown = [part for part in parts if part not in depends] if not array.startswith("input") else []
            if unknown:
                todo += unknown
                continue
            todo.pop()
            depends[array] = array.startswith("input") or (
                self._label(array) != "StopGradient" and any(depends[part] for part in parts)
            )
            if depends[array] and not array.startswith("input") and not self._is_linear(array, parts, depends):
                return self._label(array)
        return None if depends["output"] or self._may_be_zero("output") else "a constant"

    def _is_linear(self, array: str, parts: Sequence[str], depends: dict[str, bool]) -> bool:
        label = self._label(array)
        constants = [part for part in parts if not depends[part]]
        if label in ("Add", "Subtract"):
            return all(map(self._may_be_zero, constants))
        if label in ("Multiply", "Matmul"):
            return len(constants) == len(parts) - 1
        if label in ("Divide", "Select"):  # by a constant, on a constant condition
            return not depends[parts[label == "Divide"]]
        if label == "AsType":  # twice in a row: to integers and back
            return self._label(parts[0]) != "AsType"
        return label in _LINEAR

    def _may_be_zero(self, array: str) -> bool:
        """Whether a constant is one number everywhere, as zeros are."""
        label = self._label(array)
        parts = self.made_of.get(self.producers.get(array, ""), [])
        return label == "Full" or (label in ("Broadcast", "AsType", "Reshape") and self._may_be_zero(parts[0]))


_LINEAR = frozenset(
    [
        *("Add", "AsStrided", "AsType", "Broadcast", "Concatenate", "Conjugate", "Contiguous", "Copy", "CumSum"),
        *("CustomTransforms", "Divide", "ExpandDims", "FFT", "Flatten", "Gather", "GatherAxis", "Imag", "Matmul"),
        *("Multiply", "Negative", "NumberOfElements", "Pad", "Real", "Reshape", "Scatter", "ScatterAxis", "Select"),
        *("Slice", "SliceUpdate", "Split", "Squeeze", "Subtract", "Sum", "Transpose", "Unflatten", "View"),
    ]
)
"""The names that MLX writes for operations that are linear, some of them in one argument alone."""
