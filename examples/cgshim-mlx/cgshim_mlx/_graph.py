"""MLX: the graph behind an array, read from what MLX writes of it, for it tells nothing else."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

import mlx.core as mx

from cgshim_mlx._arrays import Array, renewed


def those_behind(ys: Sequence[Array], xs: Sequence[Array]) -> list[Array]:
    """Those of xs that are anywhere in the graph behind ys."""
    written = _written(ys, xs) if xs else ""
    return [x for at, x in enumerate(xs) if f'"input{at}" ->' in written]


def _written(ys: Sequence[Array], inputs: Sequence[Array]) -> str:
    # MLX has one name for an array, the last one
    outputs = {f"output{at}": renewed(y) for at, y in enumerate(ys)}
    text = io.StringIO()
    mx.export_to_dot(
        text, *outputs.values(), **outputs, **{f"input{at}": x for at, x in enumerate(inputs)}
    )
    return text.getvalue()


class Graph:
    """The graph behind some arrays, read from what MLX writes of it: which operation made each
    array, and of what.
    """

    def __init__(self, ys: Sequence[Array], inputs: Sequence[Array] = ()) -> None:
        text = _written(ys, inputs)
        self.outputs = [f"output{at}" for at in range(len(ys))]
        self.is_an_array_alone = text.count("label") == 1  # the operation of `renewed`
        self.labels: dict[str, str] = dict(re.findall(r"(\d+) \[label =\"(\w+)\"", text))
        self.producers = {
            array: made_by for made_by, array in re.findall(r'(\d+) -> "(\w+)"', text)
        }
        self.made_of: dict[str, list[str]] = {}
        for array, operation in re.findall(r'"(\w+)" -> (\d+)', text):
            self.made_of.setdefault(operation, []).append(array)

    def inputs(self) -> list[int]:
        """The places of the inputs that are in this graph."""
        return [
            int(array.removeprefix("input"))
            for array, _ in self._beginnings()
            if array.startswith("input")
        ]

    def has_a_derivative(self) -> bool:
        """Whether a derivative began in this graph, where MLX makes a copy of an array; not if it
        is an input's.
        """
        return any(copied for _, copied in self._beginnings())

    def _beginnings(self) -> Iterator[tuple[str, bool]]:
        """The inputs, and the arrays that no operation has made; and whether these are where a
        derivative began.
        """
        todo, seen = [(output, False) for output in self.outputs], set[tuple[str, bool]]()
        while todo:
            array, copied = node = todo.pop()
            label = self._label(array)
            if node in seen or label == "StopGradient":
                continue
            seen.add(node)
            if array.startswith("input"):
                yield array, False
            elif label is None:
                yield array, copied
            else:
                todo += [
                    (part, copied or label == "Copy")
                    for part in self.made_of[self.producers[array]]
                ]

    def _label(self, array: str) -> str | None:
        return self.labels.get(self.producers.get(array, ""))

    def nonlinear_operation(self) -> str | None:
        """What in this graph is seen not to be linear in the inputs; None where everything may be."""
        depends: dict[str, bool] = {}
        todo = list(self.outputs)
        while todo:
            array = todo[-1]
            parts = self.made_of.get(self.producers.get(array, ""), [])
            unknown = (
                [part for part in parts if part not in depends]
                if not array.startswith("input")
                else []
            )
            if unknown:
                todo += unknown
                continue
            todo.pop()
            depends[array] = array.startswith("input") or (
                self._label(array) != "StopGradient" and any(depends[part] for part in parts)
            )
            if (
                depends[array]
                and not array.startswith("input")
                and not self._is_linear(array, parts, depends)
            ):
                return self._label(array)
        return (
            None if all(depends[y] or self._may_be_zero(y) for y in self.outputs) else "a constant"
        )

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
        return label == "Full" or (label in _SAME_NUMBERS and self._may_be_zero(parts[0]))


_SAME_NUMBERS = ("Broadcast", "AsType", "Contiguous", "Reshape")
_LINEAR = frozenset(
    [
        *(
            "Add",
            "AsStrided",
            "AsType",
            "Broadcast",
            "Concatenate",
            "Conjugate",
            "Contiguous",
            "Copy",
            "CumSum",
        ),
        *(
            "CustomTransforms",
            "Divide",
            "ExpandDims",
            "FFT",
            "Flatten",
            "Gather",
            "GatherAxis",
            "Imag",
            "Matmul",
        ),
        *(
            "Multiply",
            "Negative",
            "NumberOfElements",
            "Pad",
            "Real",
            "Reshape",
            "Scatter",
            "ScatterAxis",
            "Select",
        ),
        *(
            "Slice",
            "SliceUpdate",
            "Split",
            "Squeeze",
            "Subtract",
            "Sum",
            "Transpose",
            "Unflatten",
            "View",
        ),
    ]
)
"""The names that MLX writes for operations that are linear, some of them in one argument alone."""
