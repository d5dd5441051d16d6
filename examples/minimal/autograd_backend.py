"""HIPS autograd as a backend, in its simplest form."""

from functools import partial

import autograd.numpy as anp
import numpy as np
import optree
from autograd.builtins import tuple as boxed_tuple
from autograd.core import make_vjp
from autograd.extend import defvjp_argnums, primitive, vspace
from autograd.numpy.numpy_boxes import ArrayBox
from autograd.tracer import getval, isbox

from cgshim.backend import closure_convert, is_differentiable, tensors_inside

tree_flatten = partial(optree.tree_flatten, none_is_leaf=True)
tree_unflatten = optree.tree_unflatten


supports_variables = True


def is_tensor(x):
    return isinstance(x, (np.ndarray, np.generic, ArrayBox)) and x.dtype.kind in "biufc"


def convert_to_tensor(x, dtype=None):
    if isbox(x) and not is_differentiable(np.dtype(dtype or x.dtype)):
        return np.asarray(getval(x), dtype)  # what is cut off has no derivative
    if isbox(x):
        return x if dtype is None or x.dtype == dtype else x + np.zeros((), dtype)
    return np.asarray(x, dtype)


def convert_to_numpy(x):
    return np.asarray(getval(x))


stop_gradient = convert_to_numpy


class Run:
    """One run of f, on what is in the boxes of the innermost derivative: values, or boxes of the outer ones."""

    def __init__(self, call, inputs):
        self.call = call
        self.level = max([x._trace for x in inputs if isbox(x)], default=-1)
        self.inputs = [x._value if isbox(x) and x._trace == self.level else x[...] for x in inputs]
        self.outputs, self.rule = call(self.inputs)
        self.closed = None
        refuse_captured(call, self.outputs, self.inputs)

    def connect_outputs(self, own):
        """Let what the rule reads of f's outputs be the op's own outputs, for outer derivatives."""
        unseen = {}
        for y, op_y in reversed(
            [*zip(self.outputs, own, strict=True)]
        ):  # the first, of what f returns twice
            if not isbox(op_y) or any(y is x for x in self.inputs):
                continue
            if isbox(y):
                y._value, y._trace, y._node = op_y._value, op_y._trace, op_y._node
            else:  # f has computed it where autograd does not see
                unseen[id(y)] = op_y
        if unseen:
            call = self.call
            converted = closure_convert(self.rule.grad_fn, call.backend, call.constants)
            residuals = [unseen.get(id(x), x) for x in converted.residuals]
            self.rule = self.rule.with_grad_fn(converted.rebuild(residuals))
            in_objects = tensors_inside(converted.opaque, is_tensor)
            self.closed = next((x for x in in_objects if id(x) in unseen), None)


def custom_gradient(call, inputs):
    run = Run(call, inputs)
    outputs = in_a_list(outputs_of(run, *inputs))
    run.connect_outputs([y._value if isbox(y) and y._trace == run.level else y for y in outputs])
    return run.rule.output.combine(outputs)


def in_a_list(boxes):
    items = [boxes[at] for at in range(len(boxes))]
    return [x if x.dtype.kind in "fc" else getval(x) for x in items]  # integers are constants


def refuse_captured(call, results, sources):
    """Walk back from results; what they are made of must be made of sources."""
    while results := [x for x in results if isbox(x)]:
        known = {x._node for x in sources if isbox(x)}
        todo = [x._node for x in results]
        while todo:
            node = todo.pop()
            if node not in known:
                known.add(node)
                todo += node.parents or call.refuse_captured(results[0])
        results, sources = ([x._value for x in xs if isbox(x)] for xs in (results, sources))


@primitive
def outputs_of(run, *inputs):  # autograd asks once for each derivative, the innermost last
    return tuple(map(getval, run.outputs))


def vjp_of_outputs(argnums, outputs, arguments, _):
    run, *inputs = arguments

    def pullback(upstreams):
        alone = run.call.once_differentiable or run.closed is not None
        gradients_of = gradients_alone if alone else connected_gradients
        gradients = gradients_of(run, len(inputs), *inputs, *in_a_list(upstreams))
        return [
            vspace(inputs[at - 1]).zeros() if gradients[at - 1] is None else gradients[at - 1]
            for at in argnums
        ]

    return pullback


def connected_gradients(run, count, *tensors):
    upstreams = [conjugated(u) for u in tensors[count:]]
    gradients, _ = run.rule(run.inputs, upstreams, run.call.variables)
    refuse_captured(run.call, gradients, [*run.inputs, *run.outputs, *tensors])
    levels = {x._trace for x in tensors if isbox(x)}
    return [None if g is None else conjugated(below(g, levels)) for g in gradients]


def below(x, levels):
    """Return what is in the boxes of derivatives that are not among these: they are over."""
    while isbox(x) and x._trace not in levels:
        x = x._value
    return x


def conjugated(x):  # autograd's gradients are the conjugates of those of a rule
    return anp.conj(x) if x.dtype.kind == "c" else x


@primitive
def gradients_alone(run, count, *tensors):
    gradients = connected_gradients(run, count, *tensors)
    return tuple(
        np.zeros(x.shape, x.dtype) if g is None else getval(g)
        for x, g in zip(tensors, gradients, strict=False)
    )


def vjp_of_gradients(argnums, _, arguments, __):
    run = arguments[0]

    def refuse(upstreams):
        if run.call.once_differentiable:
            run.call.refuse_second_order("autograd's derivative of a gradient")
        run.call.refuse_unconnected(run.closed, "may hold an output of f")

    return refuse


defvjp_argnums(outputs_of, vjp_of_outputs)
defvjp_argnums(gradients_alone, vjp_of_gradients)


def vjp(fn, inputs):
    def fn_and_inputs(
        xs,
    ):  # the inputs come along, for autograd warns of an output that depends on none of them
        return boxed_tuple((boxed_tuple(tuple(fn(*xs))), xs))

    xs = tuple(inputs)
    pull_back, (outputs, _) = make_vjp(fn_and_inputs, xs)

    def pullback(upstreams):
        gradients = pull_back((tuple(upstreams), vspace(xs).zeros()))
        return list(gradients)

    return list(outputs), pullback


def vjp_of_rules(fn, inputs):
    outputs, pullback = vjp(fn, inputs)
    return outputs, lambda upstreams: [*map(conjugated, pullback([*map(conjugated, upstreams)]))]
