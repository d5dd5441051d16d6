"""One custom gradient, written once, right in NumPy, JAX, PyTorch and TensorFlow."""

import importlib
from typing import Any

from cgshim._choice import config_backend as config_backend
from cgshim._choice import set_backend as set_backend
from cgshim._choice import use_backend as use_backend
from cgshim._custom_gradient import op_custom_gradient as op_custom_gradient
from cgshim._embed import op_embed_gradient as op_embed_gradient
from cgshim._errors import BackendError as BackendError
from cgshim._errors import CustomGradientError as CustomGradientError
from cgshim._errors import CustomGradientTypeError as CustomGradientTypeError
from cgshim._errors import CustomGradientValueError as CustomGradientValueError
from cgshim._errors import TransformationError as TransformationError
from cgshim._registry import available_backends as available_backends
from cgshim._vjp import op_grad as op_grad
from cgshim._vjp import op_value_and_grad as op_value_and_grad
from cgshim._vjp import op_vjp as op_vjp


def __getattr__(name: str) -> Any:
    """Return op_exp or another op_<name>: a function of cgshim.ops, imported (and NumPy with it) when first used."""
    if name.startswith("op_"):
        ops = importlib.import_module("cgshim.ops")
        return getattr(ops, name.removeprefix("op_"))
    raise AttributeError(f"module 'cgshim' has no attribute {name!r}")
