"""PyTorch, eager mode: `plain` does most calls, `attach` any.

`run` is a run of f, whose outputs `aliases` makes views of what they show. `second_order` is for
gradients that are differentiated, `vjp` for derivatives of any function.
"""
