"""The shapes and dtypes of tensors that do not exist yet: what a host function declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cgshim._dtypes import dtype_name, is_dtype
from cgshim._errors import CustomGradientTypeError, describe_spec, refusal, shape_of


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape and the dtype of a tensor, without its values.

    Parameters
    ----------
    shape : tuple of int or None
        None stands for a size that is not known yet, as in a traced tf.function.
    dtype : str or dtype
        Any framework's dtype, or its name.

    Examples
    --------
    >>> Spec((2, 3), "float32")
    f32[2,3]
    """

    shape: tuple[Any, ...]
    dtype: Any

    def __post_init__(self) -> None:
        if isinstance(self.shape, (int, str)) or self.shape is None:
            raise refusal(CustomGradientTypeError, "Spec", must="shape must be a tuple of sizes",
                          got=repr(self.shape), do="write (2,) or ()")  # fmt: skip
        if isinstance(self.dtype, str) and not is_dtype(self.dtype):
            raise refusal(CustomGradientTypeError, "Spec",
                          must="dtype must be a framework's, or its name", got=repr(self.dtype),
                          do='write "float32", or torch.float32')  # fmt: skip

    def __repr__(self) -> str:
        return describe_spec(self.shape, self.dtype)


def spec_of(x: Any) -> Spec:
    """Return the Spec of anything that has a shape and a dtype, with the dtype's name that all
    frameworks share.
    """
    if isinstance(x, Spec) and isinstance(x.dtype, str) and isinstance(x.shape, tuple):
        return x
    return Spec(shape_of(x.shape), dtype_name(x.dtype))
