"""PyTorch: what f and its rule read: in autograd's graph (`walk`), before f ran (`existing`), under
functional_call and vmap (`state`), and while a rule makes a graph (`reads`).
"""
