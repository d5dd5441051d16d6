"""NumPy: the run of f on values, for one derivative around the call.

Most calls have few arrays, one level of derivatives, and close over no box. What these cost is the number of Python
functions that run. So this path, here and in `_rule.py`, looks at the types and kinds of all arrays at once, by
functions that are written in C, and calls a Python function only if one of the arrays needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cgshim.backend import ONE_TENSOR, rule_of
from cgshim_numpy._arrays import KINDS_OF_FLOATS, Array, as_arrays, is_float, kind_of
from cgshim_numpy._private import getval, isbox
from cgshim_numpy._record import Record, is_recorded, records_of
from cgshim_numpy._refusals import BOXABLE, boxable
from cgshim_numpy._trees import tree_flatten

if TYPE_CHECKING:
    from cgshim.backend import Call, Rule
    from cgshim_numpy._plain import PlainRules


class Run:
    """A run of f, of which there is one per call, and the rule that it returned."""

    __slots__ = (
        "_rule", "are_floats", "call", "count", "dtypes", "grad_fn", "inputs", "kinds", "plain", "shapes"
    )  # fmt: skip

    record: Any = None  # a Record, in a run that is recorded
    leaves: Sequence[Any] = ()
    given: Sequence[Any] = ()
    _rule: Rule | None
    grad_fn: Callable[..., Any] | None
    """the function that f returned, if all about it is plain"""
    inputs: Sequence[Any]
    """what f was given, if the rule is called with it; the rule keeps all else that it needs"""
    kinds: Sequence[str]
    """the kind of each output's dtype, which tells if it has a gradient"""
    are_floats: bool
    """whether all outputs have one"""

    def __init__(self, call: Call, count: int, plain: PlainRules | None = None) -> None:
        """Prepare the run of a call with `count` inputs."""
        self.call = call
        self.count = count
        self.plain = plain
        self.grad_fn = self._rule = None

    def run_f(self, values: Sequence[Array]) -> Sequence[Array]:
        """Return the outputs of f if its inputs have these values."""
        inputs = as_arrays(values)
        result = self.call.run(inputs)
        if self.plain is not None and type(result) is tuple and len(result) == 2:
            output, grad_fn = result
            if type(output) in PLAIN and output.dtype.kind == "f" and self.plain.include(grad_fn):
                self.grad_fn, self.kinds, self.are_floats, self.inputs = grad_fn, "f", True, ()
                self.shapes, self.dtypes = [x.shape for x in inputs], [x.dtype for x in inputs]
                return [output]
        return self._read(self.call.read(result, inputs), inputs)

    def _read(self, result: tuple[Sequence[Array], Rule], inputs: Sequence[Any]) -> Sequence[Array]:
        """Keep the rule, and the inputs if it is called with them; return the outputs as autograd takes them."""
        outputs, rule = result
        self._rule = rule
        self.inputs = inputs if rule.needs_inputs else ()
        are_boxable = BOXABLE.issuperset(map(type, outputs))
        if not are_boxable:
            outputs = values_of(self.call, outputs)
        self.kinds = [*map(kind_of, outputs)]
        self.are_floats = KINDS_OF_FLOATS.issuperset(self.kinds)
        if are_boxable:
            return outputs
        return boxable(self.call, [y if is_float(y) else np.asarray(y) for y in outputs])

    @property
    def rule(self) -> Rule:
        """The rule that f returned, on the tensors that it holds."""
        if self._rule is None:
            shapes = zip(self.shapes, self.dtypes, strict=True)
            like_inputs = [np.broadcast_to(np.empty((), dtype), shape) for shape, dtype in shapes]
            assert self.grad_fn is not None
            self._rule = rule_of(self.call.arguments, self.grad_fn, ONE_TENSOR, like_inputs, None)
        return self._rule

    def per_output(self, of_outputs: Any) -> list[Array]:
        """Return the outputs, or their upstream gradients, one by one: autograd has one value, a tuple of several."""
        return [of_outputs] if len(self.kinds) == 1 else [of_outputs[i] for i in range(len(self.kinds))]

    def outputs_in(self, ans: Any) -> list[Array]:
        """Return the outputs; those that have no gradient as values, even out of a tuple that is in a box."""
        outputs = self.per_output(ans)
        if self.are_floats:
            return outputs
        return [y if kind in KINDS_OF_FLOATS else getval(y) for y, kind in zip(outputs, self.kinds, strict=True)]


PLAIN = frozenset([np.ndarray, np.float64, np.float32, np.float16])
"""the classes of what a plain function of floats returns"""


# --- What comes from elsewhere ----------------------------------------------------------------------------------------


def values_of(call: Call, arrays: Sequence[Array], own: Record | None = None) -> list[Array]:
    """Return the values of what f or its rule returned, out of recorded values of its own and of earlier calls.

    A box of a derivative, or of a record that is still being written, was closed over: these are refused.
    """
    for box in filter(isbox, arrays):
        if not is_recorded(box) or any(each.running for each in records_of(box) if each is not own):
            refuse_box(call, box)
    return [x._value if isbox(x) else x for x in arrays]


def refuse_box(call: Call, box: Any) -> None:
    """Raise the error for a box that reached f or its rule in a way that the search of f's closure does not see."""
    options = call.options.values()
    call.refuse_captured(next(filter(isbox, [*options, *tree_flatten([*options])[0]]), box))
