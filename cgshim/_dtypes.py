"""Read the dtypes of any framework by their names."""

from __future__ import annotations

from typing import Any

from cgshim._foreign import constant_when_traced


def dtype_name(dtype: object) -> str:
    """Return the framework-free name of a framework's dtype: torch.float32, tf.float32 and np.float32 are "float32"."""
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def is_complex(dtype: object) -> bool:
    """Return True if a framework's dtype is one of its complex ones."""
    return dtype_name(dtype).startswith("complex")


@constant_when_traced
def is_differentiable(dtype: Any) -> bool:
    """Return True if tensors of this dtype have gradients: the floats and the complex numbers."""
    try:
        return _is_differentiable[dtype]
    except KeyError:
        return _is_differentiable.setdefault(dtype, dtype_name(dtype).startswith(("float", "bfloat", "complex")))


_is_differentiable: dict[Any, bool] = {}
