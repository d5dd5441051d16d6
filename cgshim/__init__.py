"""One custom gradient, written once, right in NumPy, JAX, PyTorch and TensorFlow."""

import importlib
from typing import TYPE_CHECKING, Any

from cgshim._custom_jvp import op_custom_jvp as op_custom_jvp
from cgshim._decorator import op_custom_gradient as op_custom_gradient
from cgshim._dispatch import (
    config_backend as config_backend,
    set_backend as set_backend,
    use_backend as use_backend,
)
from cgshim._embed import op_embed_gradient as op_embed_gradient
from cgshim._errors import (
    BackendError as BackendError,
    CustomGradientError as CustomGradientError,
    CustomGradientTypeError as CustomGradientTypeError,
    CustomGradientValueError as CustomGradientValueError,
    TransformationError as TransformationError,
)
from cgshim._protocol import Tensor as Tensor
from cgshim._registry import available_backends as available_backends, own_version as _own_version
from cgshim._transforms import (
    op_grad as op_grad,
    op_jvp as op_jvp,
    op_value_and_grad as op_value_and_grad,
    op_vjp as op_vjp,
)

if TYPE_CHECKING:
    from cgshim.host import Spec as Spec, host_errors as host_errors, op_host as op_host

    __version__: str

_OF_HOST = ("op_host", "host_errors", "Spec")
_MODULES = {"ops": "cgshim.ops", "testing": "cgshim.testing"}


def __getattr__(name: str) -> Any:
    """Return the version, or import on first use a name that needs NumPy: op_host, cgshim.ops.

    Raises
    ------
    AttributeError
        If cgshim has no such name.
    """
    if name == "__version__":
        return _own_version()
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _OF_HOST:
        return getattr(importlib.import_module("cgshim.host"), name)
    if name.startswith("op_"):
        ops = importlib.import_module("cgshim.ops")
        return getattr(ops, name.removeprefix("op_"))
    raise AttributeError(f"module 'cgshim' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also those that are imported on first use."""
    return sorted({*globals(), *_OF_HOST, *_MODULES, "__version__"} - _PRIVATE)


_PRIVATE = {"importlib", "TYPE_CHECKING", "Any"}
