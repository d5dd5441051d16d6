"""A chain of reversible blocks, which gets its inputs back from its outputs: of all activations it
keeps the last.

Gomez, Ren, Urtasun and Grosse 2017, "The Reversible Residual Network". Published as
_ReversibleFunction and ReversibleBlock in lucidrains/reformer-pytorch,
`reformer_pytorch/reversible.py`. There the weights are state of the modules f and g; here they are
an argument.
"""

from cgshim import op_custom_gradient, op_vjp, ops


@op_custom_gradient
def reversible(f, g, x1, x2, weights):
    """The outputs of the blocks y1 = x1 + f(x2, a), y2 = x2 + g(y1, b), for each pair (a, b) of the
    weights in turn.

    f and g return a tensor shaped as the first argument; a and b are trees of tensors.
    """
    # of which no framework records anything
    y1, y2, constants = ops.tree_map(ops.stop_gradient, (x1, x2, weights))
    for a, b in constants:
        y1 = y1 + f(y2, a)
        y2 = y2 + g(y1, b)

    def grad(upstream):
        (at1, at2), (of1, of2), of_weights = (y1, y2), upstream, []
        for a, b in reversed(weights):
            change, pullback = op_vjp(g, at1, b, as_in_rules=True)
            through, of_b = pullback(of2)
            at2, of1 = at2 - change, of1 + through
            change, pullback = op_vjp(f, at2, a, as_in_rules=True)
            through, of_a = pullback(of1)
            at1, of2 = at1 - change, of2 + through
            of_weights = [(of_a, of_b), *of_weights]
        return None, None, of1, of2, of_weights

    return (y1, y2), grad
