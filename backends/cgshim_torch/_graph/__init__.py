"""PyTorch: what f and its rule read: in autograd's graph (`walk`), what existed before f ran and the
state of modules (`existing`), and while a rule makes a graph (`reads`); what a tensor is at each
level of torch.func (`levels`); and linear functions, which have a transpose (`transpose`).
"""
