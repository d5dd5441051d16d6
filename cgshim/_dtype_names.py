"""The names of dtypes, as frameworks and their backends give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_named_by: dict[str, Callable[[Any], str]] = {}


def let_name_dtypes(root: str, function: Callable[[Any], str]) -> None:
    """Register a backend's function that names dtypes of classes under an import root."""
    _named_by[root] = function


def unchecked_name(dtype: object) -> str:
    """Return the name of any dtype, from its backend or itself: "float32" for torch.float32."""
    named = _named_by.get(root_of(dtype))
    if named is not None:
        return named(dtype)
    if isinstance(dtype, type):  # np.float32, or Python's float
        return dtype.__name__
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).rpartition(".")[2]


def root_of(dtype: object) -> str:
    """Return the import root of a dtype's class, or of a dtype that is a class."""
    kind = dtype if isinstance(dtype, type) else type(dtype)
    return kind.__module__.partition(".")[0]
