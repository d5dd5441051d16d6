"""Any tree of arguments, any convention, any return form: the gradients are those of a plain
autodiff twin.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import cgshim
from cgshim.testing.conformance import Framework
from cgshim.testing.conformance._conventions import CALLABLES, FLAT, STRUCTURED

FACTOR = -3.0
"""What the rule says beyond the truth, so that its gradients cannot be taken for autodiff's."""

few_examples = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Placeholder:
    """A tensor to be, of some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return f"tensor{list(self.shape)}"


placeholders = st.sampled_from([(), (2,), (2, 1), (0,)]).map(Placeholder)
statics = st.sampled_from([None, "static", 3, len])  # op_vjp makes tensors of floats
trees = st.recursive(
    placeholders | placeholders | statics,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("cab"), children, max_size=3)
    ),
    max_leaves=4,
)

OUTPUTS: dict[str, Callable[[Any, list[Any]], Any]] = {
    "flat": lambda total, each: (total, *each),
    "nested": lambda total, each: {"total": total, "each": [each, "static"]},
    "reversed": lambda total, each: [*reversed(each), None, (total,)],
}
"""A structure for an output that depends on all tensors, and one more for each."""


def by_argument(gradients: list[list[Any]], rebuild: Callable[[list[list[Any]]], list[Any]]) -> Any:
    return tuple(rebuild(gradients))


def without_static(
    gradients: list[list[Any]], rebuild: Callable[[list[list[Any]]], list[Any]]
) -> Any:
    return [tree for tree, leaves in zip(rebuild(gradients), gradients, strict=True) if leaves]


def flat(gradients: list[list[Any]], rebuild: Callable[[list[list[Any]]], list[Any]]) -> Any:
    return list(itertools.chain(*gradients))


RETURNS = {form.__name__: form for form in (by_argument, without_static, flat)}


class Twins:
    """An op and its plain twin, for arguments of given trees: sums of cubes, and each tensor
    scaled.
    """

    def __init__(self, framework: Framework, trees: Sequence[Any], output: str) -> None:
        self.framework = framework
        self.pack = OUTPUTS[output]
        flattened = [framework.backend.tree_flatten(tree) for tree in trees]
        self.leaves = [leaves for leaves, _ in flattened]
        self.structures = [structure for _, structure in flattened]
        self.count = sum(isinstance(leaf, Placeholder) for leaves in self.leaves for leaf in leaves)
        labels, _ = framework.backend.tree_flatten(self.pack("total", list(range(self.count))))
        self.order = [label for label in labels if label == "total" or type(label) is int]

    def fill(self, tensors: Sequence[Any], static: bool = True) -> list[Any]:
        """The arguments, around these tensors, with or without what is static."""
        rest = iter(tensors)
        fill = lambda leaf: (
            next(rest) if isinstance(leaf, Placeholder) else leaf if static else None
        )
        return [
            self.framework.backend.tree_unflatten(structure, [fill(leaf) for leaf in leaves])
            for leaves, structure in zip(self.leaves, self.structures, strict=True)
        ]

    def tensors(self, tree: Any) -> list[Any]:
        """The tensors of a tree in flat order."""
        leaves, _ = self.framework.backend.tree_flatten(tree)
        return [leaf for leaf in leaves if self.framework.backend.is_tensor(leaf)]

    def plain(self, *args: Any) -> Any:
        """The function, for autodiff."""
        tensors = self.tensors(args)
        cubes = [(at + 2.0) * cgshim.op_sum(x * x * x) for at, x in enumerate(tensors)]
        return self.pack(sum(cubes[1:], cubes[0]), [(at + 1.5) * x for at, x in enumerate(tensors)])

    def op(self, form: str, kind: str, returns: str) -> Callable[..., Any]:
        """The function with a rule: the truth times FACTOR, in some convention and some return
        form.
        """
        structured = form in STRUCTURED
        write = (STRUCTURED if structured else FLAT)[form]

        @cgshim.op_custom_gradient
        def op(*args: Any) -> Any:
            squares = [x * x for x in self.tensors(args)]

            def rule(upstream: Any, args: Sequence[Any] = ()) -> Any:
                flat = self.tensors(upstream) if structured else upstream
                of = dict(zip(self.order, flat, strict=True))
                gradients = iter(
                    FACTOR * ((at + 2.0) * 3.0 * square * of["total"] + (at + 1.5) * of[at])
                    for at, square in enumerate(squares)
                )
                split = [
                    [next(gradients) for leaf in leaves if isinstance(leaf, Placeholder)]
                    for leaves in self.leaves
                ]
                return RETURNS[returns](
                    split, lambda split: self.fill(itertools.chain(*split), static=False)
                )

            return self.plain(*args), CALLABLES[kind](write(rule))

        return op

    def values(self) -> list[Any]:
        """Asymmetric numbers for every tensor."""
        shapes = [
            leaf.shape for leaves in self.leaves for leaf in leaves if isinstance(leaf, Placeholder)
        ]
        return [self._numbers(shape, at + 1.0) for at, shape in enumerate(shapes)]

    def upstream(self, output: Any) -> Any:
        """Asymmetric upstream gradients for an output, and None for what is static in it."""
        leaves, structure = self.framework.backend.tree_flatten(output)
        upstreams = [
            self._numbers(leaf.shape, 0.5 - at) if self.framework.backend.is_tensor(leaf) else None
            for at, leaf in enumerate(leaves)
        ]
        return self.framework.backend.tree_unflatten(structure, upstreams)

    def _numbers(self, shape: Any, start: float) -> Any:
        count = int(np.prod(tuple(shape)))
        return self.framework.tensor(
            (start + 0.25 * np.arange(count)).reshape(tuple(shape)).astype("float32")
        )


arguments = st.lists(trees, min_size=1, max_size=3)
# Forms that name x and y fit ops of two arguments alone; the conformance cases have them.
forms = st.sampled_from([form for form in (*STRUCTURED, *FLAT) if "x, y" not in form])


def check_truth_times_factor(framework: Framework, found: Any, truth: Any) -> None:
    leaves, structure = framework.backend.tree_flatten(framework.numpy(truth))
    scaled = [leaf if leaf is None else FACTOR * leaf for leaf in leaves]
    framework.check_equal(found, framework.backend.tree_unflatten(structure, scaled))


@given(
    arguments,
    st.sampled_from(list(OUTPUTS)),
    forms,
    st.sampled_from(list(CALLABLES)),
    st.sampled_from(list(RETURNS)),
)
@few_examples
def test_first_order(
    backend: str, trees: list[Any], output: str, form: str, kind: str, returns: str
) -> None:
    framework = Framework(backend)
    twins = Twins(framework, trees, output)
    assume(twins.count)
    args = twins.fill(twins.values())
    expected_output, twin_pullback = cgshim.op_vjp(twins.plain, *args)
    found_output, pullback = cgshim.op_vjp(twins.op(form, kind, returns), *args)
    framework.check_equal(found_output, framework.numpy(expected_output))
    upstream = twins.upstream(expected_output)
    check_truth_times_factor(framework, pullback(upstream), twin_pullback(upstream))


@given(arguments, st.sampled_from(list(OUTPUTS)), forms, st.sampled_from(list(RETURNS)))
@few_examples
def test_second_order(backend: str, trees: list[Any], output: str, form: str, returns: str) -> None:
    framework = Framework(backend)
    twins = Twins(framework, trees, output)
    assume(twins.count)
    args = twins.fill(twins.values())
    upstream = twins.upstream(twins.plain(*args))

    def second(fn: Callable[..., Any]) -> tuple[Any, ...]:
        gradients, pullback = cgshim.op_vjp(
            lambda *args: cgshim.op_vjp(fn, *args)[1](upstream), *args
        )
        return pullback(twins.upstream(gradients))

    check_truth_times_factor(
        framework, second(twins.op(form, "lambda", returns)), second(twins.plain)
    )
