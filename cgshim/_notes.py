"""Lead from a framework's own error in f to its mend, by a note that says what to write instead."""

from __future__ import annotations

import re

from cgshim._errors import sentence

_NOTES = (
    (
        r"TracerArrayConversion|numpy\(\) on Tensor|data pointer of Tensor|to a numpy array"
        r"|ConcretizationTypeError|calling \.item\(\)|not 'SymbolicTensor'",
        "f must run where its arguments have no values yet, or are differentiated",
        "NumPy or Python at work on a tensor",
        "call functions of cgshim.ops, or let it run on the host: op_custom_gradient(host_outputs=...), op_host",
    ),
    (
        r"TracerBoolConversion|OperatorNotAllowedInGraph|data-dependent",
        "f must run where its arguments have no values yet",
        "a branch on a tensor",
        "write ops.where for elements, op_cond for programs",
    ),
    (
        r"must be Tensor, not|as an abstract array",
        "f must call functions of the framework whose tensors it is given",
        "another framework's function",
        "call functions of cgshim.ops, such as ops.exp, which take tensors of all",
    ),
    (
        # the second is oneDNN's, which TensorFlow takes where the processor has it
        r"In\[[01]\] ndims must be >= 2|different ndims: (\[\d+\]|.* vs\. \[\d+\])|Shape must be rank 2 but is rank 1",
        "@ of TensorFlow takes matrices",
        "a vector",
        "write ops.matmul",
    ),
)
"""what an error says in which framework, and what it means for one f that runs in all"""


def add_note(error: Exception, op: str) -> None:
    """Add to an error that f raised what to write instead, if it is one of those that cgshim's
    users meet.
    """
    text = f"{type(error).__name__}: {error}"
    for pattern, must, got, do in _NOTES:
        if re.search(pattern, text):
            if must in "\n".join([text, *getattr(error, "__notes__", ())]):  # of an inner op
                return
            note = sentence(op, must=must, got=got, do=do)
            if hasattr(error, "add_note"):
                error.add_note(note)
            else:  # Python 3.10 has no notes
                error.args = (f"{error}\n{note}",)
            return
