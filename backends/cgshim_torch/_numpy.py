"""PyTorch: NumPy's functions, by NumPy's names, with NumPy's parameters and numbers.

Lists name what PyTorch has under the same or another name; what differs is a function here. The front end defines the
rest in terms of these, or raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import cgshim_torch._numpy
from cgshim.backend import Axis, Tensor, axes_of, checked_axis
from cgshim_torch import _algebra, _creation
from cgshim_torch._algebra import as_float, dtype_of


def numpy_function(name: str, /) -> Callable[..., Any] | None:
    own = f"np_{name.replace('.', '_')}"
    for module in (cgshim_torch._numpy, _algebra, _creation):  # torch.compile cannot trace globals()
        if hasattr(module, own):
            return getattr(module, own)  # type: ignore[no-any-return]
    found: Any = torch
    for part in _SAME.get(name, "").split("."):
        found = getattr(found, part, None)
    return found  # type: ignore[no-any-return]


_ALIKE = """
sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp expm1 exp2 log log1p log2 log10 sqrt
square sign floor ceil trunc negative positive reciprocal abs isnan isinf isfinite deg2rad rad2deg signbit sinc
i0 nan_to_num angle logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor add
subtract multiply divide remainder fmod floor_divide maximum minimum fmax fmin arctan2 less less_equal greater
greater_equal not_equal copysign nextafter heaviside gcd lcm float_power where atleast_1d atleast_2d atleast_3d
broadcast_to vstack hstack dstack column_stack swapaxes moveaxis fliplr flipud kron allclose isclose frexp ldexp
isneginf isposinf isreal linalg.det linalg.inv linalg.slogdet linalg.cholesky linalg.eigvalsh linalg.eigh
linalg.eigvals linalg.eig linalg.svdvals linalg.pinv linalg.matrix_rank linalg.matrix_power linalg.qr
linalg.cond linalg.multi_dot special.erf special.erfc special.erfinv special.gammaln special.digamma
special.expit special.logit special.xlogy special.xlog1py special.entr special.ndtr special.ndtri
special.log_ndtr special.i0 special.i0e special.i1 special.i1e special.expm1 special.log1p special.exp2
special.gammainc special.gammaincc special.polygamma special.multigammaln special.zeta special.erfcx
"""
_RENAMED = {
    "power": "pow", "conj": "conj_physical", "invert": "bitwise_not",
    "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
    "equal": "eq", "rint": "round", "fabs": "abs",
}  # fmt: skip
_SAME = {name: name for name in _ALIKE.split()} | _RENAMED


# --- Reductions -------------------------------------------------------------------------------------------------


def np_sum(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    axes = axes_of(a, axis)
    if axis is not None and not axes:  # torch would sum over all
        return a.to(dtype_of(dtype)) if dtype else a
    return torch.sum(a, axes, keepdim=keepdims, dtype=dtype_of(dtype))


def np_prod(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    if a.ndim == 0 or (axis is None and not keepdims):
        return torch.prod(a, dtype=dtype_of(dtype))
    for at in sorted(axes_of(a, axis), reverse=True):  # torch takes one at a time
        a = torch.prod(a, at, keepdim=keepdims, dtype=dtype_of(dtype))
    return a


def np_max(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return torch.amax(a, axes_of(a, axis), keepdim=keepdims)


def np_min(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return torch.amin(a, axes_of(a, axis), keepdim=keepdims)


def np_mean(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    return torch.mean(as_float(a, dtype), axes_of(a, axis), keepdim=keepdims)


def np_var(
    a: Tensor, axis: Axis = None, dtype: Any = None, *, ddof: float = 0, keepdims: bool = False,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    correction = ddof if correction is None else correction
    return torch.var(as_float(a, dtype), axes_of(a, axis), correction=correction, keepdim=keepdims)


def np_std(
    a: Tensor, axis: Axis = None, dtype: Any = None, *, ddof: float = 0, keepdims: bool = False,
    correction: float | None = None,
) -> Tensor:  # fmt: skip
    correction = ddof if correction is None else correction
    return torch.std(as_float(a, dtype), axes_of(a, axis), correction=correction, keepdim=keepdims)


def np_any(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return torch.any(a.to(torch.bool), axes_of(a, axis), keepdim=keepdims)


def np_all(a: Tensor, axis: Axis = None, *, keepdims: bool = False) -> Tensor:
    return torch.all(a.to(torch.bool), axes_of(a, axis), keepdim=keepdims)


def np_argmax(a: Tensor, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    return _argument(torch.argmax, a, axis, keepdims)


def np_argmin(a: Tensor, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
    return _argument(torch.argmin, a, axis, keepdims)


def _argument(of: Callable[..., Tensor], a: Tensor, axis: int | None, keepdims: bool) -> Tensor:
    found = of(a, axis, keepdim=keepdims and axis is not None)
    return found.reshape((1,) * a.ndim) if keepdims and axis is None else found


def np_cumsum(a: Tensor, axis: int | None = None, dtype: Any = None) -> Tensor:
    return torch.cumsum(a.reshape(-1) if axis is None else a, axis or 0, dtype=dtype_of(dtype))


def np_cumprod(a: Tensor, axis: int | None = None, dtype: Any = None) -> Tensor:
    return torch.cumprod(a.reshape(-1) if axis is None else a, axis or 0, dtype=dtype_of(dtype))


def np_sort(a: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None) -> Tensor:
    return torch.sort(a.reshape(-1) if axis is None else a, dim=-1 if axis is None else axis, stable=True).values


def np_argsort(a: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None) -> Tensor:
    return torch.sort(a.reshape(-1) if axis is None else a, dim=-1 if axis is None else axis, stable=True).indices


# --- Shapes -----------------------------------------------------------------------------------------------------


def np_reshape(a: Tensor, /, shape: int | Sequence[int]) -> Tensor:
    return torch.reshape(a, (shape,) if isinstance(shape, int) else tuple(shape))


def np_ravel(a: Tensor) -> Tensor:
    return a.reshape(-1)


def np_transpose(a: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    return a.permute(tuple(reversed(range(a.ndim))) if axes is None else tuple(axes))


def np_expand_dims(a: Tensor, axis: int | Sequence[int]) -> Tensor:
    named = (axis,) if isinstance(axis, int) else tuple(axis)
    for at in sorted(checked_axis(a.ndim + len(named), at) for at in named):
        a = a.unsqueeze(at)
    return a


def np_squeeze(a: Tensor, axis: Axis = None) -> Tensor:
    if axis is None:
        return a.squeeze()
    axes = axes_of(a, axis)
    if any(a.shape[at] != 1 for at in axes):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    return a.squeeze(axes)


def np_broadcast_arrays(*args: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.broadcast_tensors(*args))


def np_concatenate(arrays: Sequence[Tensor], /, axis: int | None = 0, *, dtype: Any = None) -> Tensor:
    arrays = [array.to(dtype_of(dtype)) for array in arrays] if dtype else list(arrays)
    return torch.cat([array.reshape(-1) for array in arrays] if axis is None else arrays, axis or 0)


def np_stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.stack(list(arrays), axis)


def np_split(ary: Tensor, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    if isinstance(indices_or_sections, int) and ary.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return np_array_split(ary, indices_or_sections, axis)


def np_array_split(ary: Tensor, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    sections = indices_or_sections if isinstance(indices_or_sections, int) else tuple(indices_or_sections)
    return list(torch.tensor_split(ary, sections, axis))


def np_repeat(a: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    counts = repeats if isinstance(repeats, int) else torch.as_tensor(repeats, device=a.device)
    return torch.repeat_interleave(a, counts, axis)


def np_tile(A: Tensor, reps: int | Sequence[int]) -> Tensor:  # noqa: N803
    return torch.tile(A, (reps,) if isinstance(reps, int) else tuple(reps))


def np_roll(a: Tensor, shift: int | Sequence[int], axis: Axis = None) -> Tensor:
    return torch.roll(a, shift, axis) if axis is not None else torch.roll(a, shift)


def np_flip(m: Tensor, axis: Axis = None) -> Tensor:
    return torch.flip(m, axes_of(m, axis))


def np_rot90(m: Tensor, k: int = 1, axes: tuple[int, int] = (0, 1)) -> Tensor:
    return torch.rot90(m, k, axes)


def np_take(a: Tensor, indices: Any, axis: int | None = None) -> Tensor:
    if axis is None:
        a, axis = a.reshape(-1), 0
    return a[(slice(None),) * checked_axis(a.ndim, axis) + (torch.as_tensor(indices, device=a.device),)]


def np_take_along_axis(arr: Tensor, indices: Tensor, axis: int | None = -1) -> Tensor:
    return torch.take_along_dim(arr, indices, axis)


def np_diag(v: Tensor, k: int = 0) -> Tensor:
    return torch.diag(v, k)


def np_diagflat(v: Tensor, k: int = 0) -> Tensor:
    return torch.diagflat(v, k)


def np_diagonal(a: Tensor, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Tensor:
    return torch.diagonal(a, offset, axis1, axis2)


def np_tril(m: Tensor, k: int = 0) -> Tensor:
    return torch.tril(m, k)


def np_triu(m: Tensor, k: int = 0) -> Tensor:
    return torch.triu(m, k)


def np_meshgrid(*xi: Tensor, indexing: str = "xy") -> list[Tensor]:
    return list(torch.meshgrid(*[x.reshape(-1) for x in xi], indexing=indexing))


def np_nonzero(a: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = torch.nonzero(a, as_tuple=True)
    return found


def np_searchsorted(a: Tensor, v: Any, side: str = "left") -> Tensor:
    return torch.searchsorted(a, torch.as_tensor(v, dtype=a.dtype, device=a.device), side=side)


def np_index_add(x: Tensor, index: Tensor, values: Tensor, axis: int) -> Tensor:
    return torch.index_add(x, axis, index, values)


def np_isin(element: Tensor, test_elements: Any) -> Tensor:
    return torch.isin(element, torch.as_tensor(test_elements, device=element.device))


def np_bincount(x: Tensor, /, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    return torch.bincount(x, weights, minlength)


# --- Parts of a complex number, and rounding --------------------------------------------------------------------


def np_real(val: Tensor) -> Tensor:
    return val.real if val.is_complex() else val


def np_imag(val: Tensor) -> Tensor:
    return val.imag if val.is_complex() else torch.zeros_like(val)


def np_hypot(x1: Tensor, x2: Tensor) -> Tensor:
    return torch.hypot(as_float(x1), as_float(x2))


def np_logaddexp(x1: Tensor, x2: Tensor) -> Tensor:
    return torch.logaddexp(as_float(x1), as_float(x2))


def np_logaddexp2(x1: Tensor, x2: Tensor) -> Tensor:
    return torch.logaddexp2(as_float(x1), as_float(x2))


def np_round(a: Tensor, decimals: int = 0) -> Tensor:
    if not (a.is_floating_point() or a.is_complex()):
        return a if decimals >= 0 else torch.round(as_float(a), decimals=decimals).to(a.dtype)
    return torch.round(a, decimals=decimals)


def np_copy(a: Tensor) -> Tensor:
    return a.clone()


def np_astype(x: Tensor, dtype: Any, /) -> Tensor:
    return x.to(dtype_of(dtype))
