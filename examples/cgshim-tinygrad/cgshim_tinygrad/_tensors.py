"""tinygrad: dtypes by their names, and tensors with a gradient of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType, least_upper_dtype, strong_dtype
from tinygrad.uop.ops import Ops, UOp

Pull = Callable[[Tensor, Sequence[Tensor], Tensor], Sequence[Tensor | None]]
"""`pull(value, sources, upstream)`: a gradient for each source, or None"""


def is_tensor(x: object, /) -> bool:
    return isinstance(x, Tensor)


def is_float(x: Tensor) -> bool:
    """Whether tinygrad differentiates by x: a weak float, which is a Python number in a Tensor, is
    a constant.
    """
    return bool(dtypes.is_float(x.dtype)) and x.dtype not in dtypes.weaks


# --- Dtypes ---------------------------------------------------------------------------------------

_NAMES = ("float16", "bfloat16", "float32", "float64", "bool")
_NAMES += tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
_BY_NAME: dict[str, DType] = {name: getattr(dtypes, name) for name in _NAMES}
_BY_DTYPE = {dtype: name for name, dtype in _BY_NAME.items()}


def dtype_name(dtype: Any, /) -> str:
    """NumPy's name: tinygrad's own are those of C, as "half" and "unsigned char"."""
    strong = strong_dtype(dtype)
    return _BY_DTYPE.get(strong, strong.name)


def dtype_named(name: str) -> DType:
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TypeError(f"tinygrad has no dtype {name}") from None


COPY, GIVEN, HIDDEN = "cgshim copy", "cgshim given", "cgshim hidden"
"""the names of the calls of `copied`: of what `vjp` differentiates, of what f is given, of what f must not capture"""

# --- Gradients of one's own -----------------------------------------------------------------------


def attached(
    value: Tensor, sources: Sequence[Tensor], pull: Pull, name: str | None = None
) -> Tensor:
    """The value, as a function of the sources whose gradient is pull's.

    All that pull needs is an argument of the call in tinygrad's graph: tinygrad replaces arguments,
    by the buffers that hold them or by the parameters of a function around them, and knows nothing
    of what a Python closure holds. It asks for gradients wherever a path leads to what is
    differentiated, also where that path is detached.
    """
    value = on_device(value).detach()

    def gradients(upstream: UOp, call: UOp) -> tuple[UOp | None, ...]:
        _, *now = map(Tensor, call.src[1:])
        refusal = refusal_in(Tensor(upstream))
        if refusal is None:
            found = pull(Tensor(call.gettuple(0)), now, Tensor(upstream))
        else:
            found = [refused_gradient(x, refusal) for x in now]
        return (None, *[None if g is None else g.uop for g in found])

    call = value.uop.param_like(0).call(
        value.uop, *[x.uop for x in sources], grad_fxn=gradients, name=name
    )
    return Tensor(call.gettuple(0))


def on_device(x: Tensor) -> Tensor:
    """x, stored: a number in a Tensor has no device, and is one node of the graph wherever the same
    number is.
    """
    return x.clone(device=Device.DEFAULT) if x.uop.device is None else x


def copied(x: Tensor, name: str = COPY) -> Tensor:
    """The same numbers and the same gradient, as a node of its own: tinygrad has one node for equal
    expressions.
    """
    return attached(x, [x], lambda _, __, upstream: [upstream], name)


# --- Gradients that nobody may take ---------------------------------------------------------------

Refuse = Callable[[], None]


def refused(x: Tensor, sources: Sequence[Tensor], refuse: Refuse) -> Tensor:
    """x, of which nobody may take the gradient by the sources."""
    return attached(
        x, sources, lambda _, now, __: [refused_gradient(source, refuse) for source in now]
    )


def refused_gradient(x: Tensor, refuse: Refuse) -> Tensor | None:
    """NaN for a gradient that does not exist; `vjp` calls refuse if it is in what reaches an
    argument.

    tinygrad does not say by what it differentiates, so an error in a call would also forbid the
    gradients that exist.
    """
    if not is_float(x):
        return None
    nan = on_device(Tensor.full(x.shape, math.nan, dtype=x.dtype, device=x.device)).uop
    return Tensor(nan.param_like(0).call(nan, aux=_Refusal(refuse)).gettuple(0))


class _Refusal(NamedTuple):
    refuse: Refuse


def refusal_in(gradient: Tensor) -> Refuse | None:
    """What to call for a gradient that is made of a refused one."""
    for u in gradient.uop.toposort(enter_calls=False):
        if u.op is Ops.FUNCTION and isinstance(u.arg.aux, _Refusal):
            return u.arg.aux.refuse
    return None


def zeros_like(x: Tensor) -> Tensor:
    return Tensor.zeros(*x.shape, dtype=x.dtype, device=x.device)


# --- Several tensors as one -----------------------------------------------------------------------


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of them all, for tinygrad does not tell a call of which of its outputs an upstream
    gradient is.
    """
    dtype = least_upper_dtype(*[x.dtype for x in tensors])
    vectors = [x.reshape(-1).cast(dtype) for x in tensors if 0 not in x.shape]
    return Tensor.cat(*vectors) if vectors else Tensor.zeros(0, dtype=dtype)


def split(vector: Tensor, like: Sequence[tuple[tuple[int, ...], DType]]) -> list[Tensor]:
    """Undo `flattened`."""
    sizes = [math.prod(shape) for shape, _ in like]
    ends = list(accumulate(sizes))
    return [
        vector[end - size : end].reshape(shape).cast(dtype)
        if size
        else Tensor.zeros(*shape, dtype=dtype)
        for (shape, dtype), size, end in zip(like, sizes, ends, strict=True)
    ]
