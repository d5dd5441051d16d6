"""NumPy: every name of autograd that its documentation does not promise, and what each is for.

All were seen in autograd 1.7.0, 1.8.0, 1.9.0 and 1.9.1. Beside these names the backend reads a
box's `_value`, `_trace` and `_node`, and a node's `parents`. `_run.py` writes to a box while f
runs. `_record.py` makes nodes: of its own class, of which autograd knows in `notrace_primitives`
what has no derivative, and autograd's, as `primitive` makes them.
"""

# ruff: noqa: I001  # one import a module, with a comment for each name

from autograd import tracer
from autograd.builtins import (
    DictBox as DictBox,  # the box of a dict, opened into a dict of boxes
    SequenceBox as SequenceBox,  # the box of a list or tuple, opened in the same way
    _make_dict as _make_dict,  # linear: a dict of boxes, put into a box
    container_take as container_take,  # linear: an item of a box of a container
    container_untake as container_untake,  # linear: the derivative of container_take
    make_sequence as make_sequence,  # linear: boxes in a list or tuple, put into a box
    sequence_extend_left as sequence_extend_left,  # linear: one more item in front
    sequence_extend_right as sequence_extend_right,  # linear: one more item at the end
)
from autograd.core import (
    backward_pass as backward_pass,  # from a node, which the transpose of a rule begins at
    make_vjp as make_vjp,  # of a function of one argument, as autograd.make_vjp is of several
    primitive_jvps as primitive_jvps,  # which primitives have a derivative in forward mode
    sparse_add as sparse_add,  # linear: how gradients of indexing are added
)
from autograd.numpy import (
    numpy_vjps as numpy_vjps,  # the derivatives of NumPy's functions, which are primitives too
    numpy_wrapper as numpy_wrapper,  # all of autograd.numpy, with the primitives behind it
)
from autograd.numpy.numpy_boxes import ArrayBox as ArrayBox  # the box of an array or a number
from autograd.tracer import (
    box_types as box_types,  # the classes of all boxes, to look for one among many values
    find_top_boxed_args as find_top_boxed_args,  # the boxes of the innermost derivative
    getval as getval,  # what is in a box, below all derivatives
    isbox as isbox,  # whether a value is a box
    new_box as new_box,  # puts a value into a box of a level, with a node of our own
    notrace_primitives as notrace_primitives,  # by class of node: what has no derivative
    trace as trace,  # runs a function on a box whose node is of a class of our own
)

from autograd.util import func as func  # a method of a class, as the primitive that it is

# from NumPy's function to its primitive; from 1.9
trace_primitives_map = getattr(tracer, "trace_primitives_map", {})
