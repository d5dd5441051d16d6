"""NumPy's functions for PyTorch, by NumPy's names, with NumPy's parameters and numbers.

Lists name PyTorch's functions under the same or another name, or with renamed parameters. Functions
that differ are defined here. The front end defines the rest, or raises an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from cgshim._axes import checked_axis
from cgshim.backend import Axis, Tensor, axes_of, dtype_name
from cgshim_torch._tensors import device_of_call


def function_of_torch(name: str) -> Callable[..., Any] | None:
    """Return PyTorch's function for a NumPy name that has no np_<name> here."""
    if name in _OF_FLOATS:
        return _of_floats(_OF_FLOATS[name])
    function: Any = torch
    for part in _SAME.get(name, "").split("."):
        function = getattr(function, part, None)
    if name not in _PARAMETERS or function is None:
        return function  # type: ignore[no-any-return]
    names = dict(pair.split("=") for pair in _PARAMETERS[name].split())
    return lambda *args, **kwargs: function(
        *args, **{names.get(name, name): x for name, x in kwargs.items()}
    )


_ALIKE = """
sin cos tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh exp expm1 exp2 log log1p
log2 log10 sqrt square sign floor ceil trunc negative positive reciprocal abs isnan isinf isfinite
deg2rad rad2deg signbit sinc i0 nan_to_num angle logical_not logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor add subtract multiply divide remainder fmod floor_divide maximum
minimum fmax fmin arctan2 less less_equal greater greater_equal not_equal copysign nextafter
heaviside gcd lcm float_power where atleast_1d atleast_2d atleast_3d broadcast_to vstack hstack
dstack column_stack hsplit vsplit moveaxis fliplr flipud kron vander isclose frexp ldexp isneginf
isposinf isreal real ravel stack bincount argmax argmin linalg.det linalg.inv linalg.slogdet
linalg.cholesky linalg.eigvalsh linalg.eigh linalg.eigvals linalg.eig linalg.svdvals linalg.pinv
linalg.matrix_rank linalg.matrix_power linalg.qr linalg.cond linalg.multi_dot special.erf
special.erfc special.erfinv special.gammaln special.digamma special.expit special.logit
special.xlogy special.xlog1py special.entr special.ndtr special.ndtri special.log_ndtr special.i0
special.i0e special.i1 special.i1e special.expm1 special.log1p special.exp2 special.gammainc
special.gammaincc special.polygamma special.multigammaln special.zeta special.erfcx fft.fft fft.ifft
fft.rfft fft.irfft fft.hfft fft.ihfft
"""
_RENAMED = {
    "power": "pow", "conj": "conj_physical", "copy": "clone", "broadcast_arrays": "broadcast_tensors",
    "invert": "bitwise_not", "left_shift": "bitwise_left_shift", "right_shift": "bitwise_right_shift",
    "equal": "eq", "rint": "round", "fabs": "abs", "special.psi": "special.digamma",
    "relu": "relu", "special.log_expit": "nn.functional.logsigmoid", "array_split": "tensor_split", "unstack": "unbind",
    "cross": "linalg.cross", "reshape": "Tensor.reshape", "tile": "Tensor.tile",
}  # fmt: skip
_PARAMETERS = {
    "tril": "m=input k=diagonal", "triu": "m=input k=diagonal", "diag": "v=input k=diagonal",
    "diagflat": "v=input k=offset", "diagonal": "a=input axis1=dim1 axis2=dim2", "rot90": "m=input axes=dims",
    "roll": "a=input shift=shifts axis=dims", "swapaxes": "a=input axis1=axis0 axis2=axis1",
    "array_split": "ary=input axis=dim", "unstack": "x=input axis=dim", "cross": "a=input b=other axis=dim",
    "tile": "reps=dims", "fft.fftshift": "x=input axes=dim", "fft.ifftshift": "x=input axes=dim",
    **{f"fft.{which}fft{n}": "a=input axes=dim" for which in ("", "i", "r", "ir") for n in ("2", "n")},
}  # fmt: skip
_SAME = {name: name for name in (*_ALIKE.split(), *_PARAMETERS)} | _RENAMED


# --- A tensor and a Python number -----------------------------------------------------------------

_NUMBERS = (int, float, complex)
_TAKE_A_NUMBER = {
    "add", "subtract", "multiply", "divide", "remainder", "floor_divide", "power",
    "less", "less_equal", "greater", "greater_equal", "equal", "not_equal",
}  # fmt: skip
"""the functions that accept a number as the second argument"""
_TAKE_TENSORS = {"maximum", "minimum", "fmax", "fmin", "arctan2", "copysign"}
"""functions of two tensors that users often call with a number"""

_QUICK = {"concatenate": torch.cat, "expand_dims": torch.unsqueeze}
"""torch's own, which raise a TypeError for arguments that only ours accept"""


def numpy_function_of(name: str, types: Sequence[Any], /) -> Callable[..., Any] | None:
    """Return a faster function for these types.

    It takes a tensor and a Python number, or accepts less than NumPy's.
    """
    if len(types) == 2 and name in _TAKE_A_NUMBER | _TAKE_TENSORS:
        of = getattr(torch, _SAME[name])
        if types[1] in _NUMBERS:
            return of if name in _TAKE_A_NUMBER else lambda x1, x2: of(x1, _as_tensor(x2, x1))
        if types[0] in _NUMBERS:
            return lambda x1, x2: of(_as_tensor(x1, x2), x2)
    return _QUICK.get(name)


def _as_tensor(number: complex, x: Tensor) -> Tensor:
    """Return a number as a tensor on x's device, in x's dtype if that can hold it.

    Only eager code calls it: Dynamo traces no ``torch.result_type``.
    """
    return torch.scalar_tensor(number, dtype=torch.result_type(x, number), device=x.device)


def dtype_of(dtype: Any) -> torch.dtype | None:
    return None if dtype is None else getattr(torch, dtype_name(dtype))


def as_float(x: Tensor, dtype: Any = None) -> Tensor:
    """Return x in this dtype; by default integers become torch's default float dtype."""
    if dtype is not None:
        return x.to(dtype_of(dtype))
    return x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())


def np_sign(x: Tensor) -> Tensor:
    return torch.where(torch.isnan(x), x.detach(), torch.sign(x))


_OF_FLOATS = {
    "hypot": torch.hypot, "logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2,
    "linalg.norm": torch.linalg.norm, "linalg.vector_norm": torch.linalg.vector_norm,
    "linalg.matrix_norm": torch.linalg.matrix_norm,
}  # fmt: skip


def _of_floats(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that also accepts integers, for a PyTorch function of only floats."""
    return lambda *args, **options: of(
        *[as_float(arg) if isinstance(arg, torch.Tensor) else arg for arg in args], **options
    )


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Promote tensors as NumPy does; torch's products need one dtype."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [tensor.to(dtype) for tensor in tensors]


def _flat(a: Tensor, axis: int | None) -> tuple[Tensor, int]:
    """Return the array and the axis; without an axis NumPy flattens the array."""
    return (a.reshape(-1), 0) if axis is None else (a, axis)


# --- Reductions -----------------------------------------------------------------------------------


def _reduced(
    of: Callable[..., Tensor], a: Tensor, axis: Axis, keepdims: bool, **options: Any
) -> Tensor:
    axes = axis if type(axis) is int and a.ndim else axes_of(a, axis)
    if axes == ():  # torch would reduce over all axes
        return of(a[..., None], -1, **options)
    return of(a, axes, keepdim=keepdims, **options)


def np_sum(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    return _reduced(torch.sum, a, axis, keepdims, dtype=dtype_of(dtype))


def np_mean(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    return _reduced(torch.mean, as_float(a, dtype), axis, keepdims)


def np_prod(a: Tensor, axis: Axis = None, dtype: Any = None, *, keepdims: bool = False) -> Tensor:
    if a.ndim == 0 or (axis is None and not keepdims):
        return torch.prod(a, dtype=dtype_of(dtype))
    for at in sorted(axes_of(a, axis), reverse=True):  # torch accepts one axis at a time
        a = torch.prod(a, at, keepdim=keepdims, dtype=dtype_of(dtype))
    return a


def _reduction(
    of: Callable[..., Tensor], as_input: Callable[[Tensor], Tensor] = lambda a: a
) -> Callable[..., Tensor]:
    return lambda a, axis=None, *, keepdims=False: _reduced(of, as_input(a), axis, keepdims)


np_max, np_min = _reduction(torch.amax), _reduction(torch.amin)
np_any = _reduction(torch.any, lambda a: a.to(torch.bool))
np_all = _reduction(torch.all, lambda a: a.to(torch.bool))
np_special_logsumexp = _reduction(torch.logsumexp)


def _cumulative(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, axis=None, dtype=None: of(*_flat(a, axis), dtype=dtype_of(dtype))


np_cumsum, np_cumprod = _cumulative(torch.cumsum), _cumulative(torch.cumprod)


def _sorted(at: int) -> Callable[..., Tensor]:
    def sort(
        a: Tensor, axis: int | None = -1, kind: str | None = None, *, stable: bool | None = None
    ) -> Tensor:
        a, axis = _flat(a, axis)
        return torch.sort(a, dim=axis, stable=True)[at]

    return sort


np_sort, np_argsort = _sorted(0), _sorted(1)


# --- Shapes ---------------------------------------------------------------------------------------


def np_transpose(a: Tensor, axes: Sequence[int] | None = None) -> Tensor:
    if axes is None and a.ndim <= 2:
        return a.t()
    return a.permute(tuple(reversed(range(a.ndim))) if axes is None else tuple(axes))


def np_squeeze(a: Tensor, axis: Axis = None) -> Tensor:
    axes = axes_of(a, axis)
    if axis is not None and any(a.shape[at] != 1 for at in axes):
        raise ValueError("cannot select an axis to squeeze out which has size not equal to one")
    return a.squeeze(axes)


def np_concatenate(
    arrays: Sequence[Tensor], /, axis: int | None = 0, *, dtype: Any = None
) -> Tensor:
    if dtype:
        arrays = [array.to(dtype_of(dtype)) for array in arrays]
    return torch.cat([array.reshape(-1) for array in arrays] if axis is None else arrays, axis or 0)


def np_split(ary: Tensor, indices_or_sections: int | Sequence[int], axis: int = 0) -> list[Tensor]:
    if isinstance(indices_or_sections, int) and ary.shape[axis] % indices_or_sections:
        raise ValueError("array split does not result in an equal division")
    return list(torch.tensor_split(ary, indices_or_sections, axis))


def np_repeat(a: Tensor, repeats: Any, axis: int | None = None) -> Tensor:
    counts = repeats if isinstance(repeats, int) else torch.as_tensor(repeats, device=a.device)
    return torch.repeat_interleave(a, counts, axis)


def np_flip(m: Tensor, axis: Axis = None) -> Tensor:
    return torch.flip(m, axes_of(m, axis))


def np_take(a: Tensor, indices: Any, axis: int | None = None) -> Tensor:
    a, axis = _flat(a, axis)
    at = torch.as_tensor(indices, device=a.device)
    at = at.long() if at.dtype in (torch.bool, torch.uint8) else at  # torch would read masks
    return a[(slice(None),) * checked_axis(a.ndim, axis) + (at,)]


def np_take_along_axis(arr: Tensor, indices: Tensor, axis: int | None = -1) -> Tensor:
    return torch.take_along_dim(arr, indices, axis)


def np_meshgrid(*xi: Tensor, indexing: str = "xy") -> list[Tensor]:
    return list(torch.meshgrid(*[x.reshape(-1) for x in xi], indexing=indexing))


np_nonzero = functools.partial(torch.nonzero, as_tuple=True)


def np_searchsorted(a: Tensor, v: Any, side: str = "left") -> Tensor:
    return torch.searchsorted(a, torch.as_tensor(v, dtype=a.dtype, device=a.device), side=side)


def np_index_add(x: Tensor, index: Tensor, values: Tensor, axis: int) -> Tensor:
    return torch.index_add(x, axis, index, values)


# --- Parts of a complex number, and rounding ------------------------------------------------------


def np_imag(val: Tensor) -> Tensor:
    return val.imag if val.is_complex() else torch.zeros_like(val)


# --- Linear algebra -------------------------------------------------------------------------------


def _in_one(of: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: of(a, b) if a.dtype is b.dtype else of(*_in_one_dtype(a, b))


np_matmul, np_inner = _in_one(torch.matmul), _in_one(torch.inner)


def np_outer(a: Tensor, b: Tensor) -> Tensor:
    return torch.outer(*[x if x.ndim == 1 else x.reshape(-1) for x in (a, b)])


def np_einsum(subscripts: str, /, *operands: Tensor) -> Tensor:
    return torch.einsum(subscripts, *_in_one_dtype(*operands))


def np_tensordot(a: Tensor, b: Tensor, axes: Any = 2) -> Tensor:
    axes = (range(-axes, 0), range(axes)) if isinstance(axes, int) else axes
    of_a, of_b = (list(axis) if isinstance(axis, Iterable) else [axis] for axis in axes)
    if [a.shape[at] for at in of_a] != [b.shape[at] for at in of_b]:  # torch broadcasts 1s
        raise ValueError("shape-mismatch for sum")
    return torch.tensordot(*_in_one_dtype(a, b), [of_a, of_b])


def np_linalg_solve(a: Tensor, b: Tensor) -> Tensor:
    a, b = _in_one_dtype(as_float(a), as_float(b))
    if 1 < b.ndim < a.ndim:  # torch might read a matrix as a stack of vectors
        b = b[(None,) * (a.ndim - b.ndim)]
    return torch.linalg.solve(a, b)


def np_linalg_solve_triangle(a: Tensor, b: Tensor, lower: bool) -> Tensor:
    a, b = _in_one_dtype(as_float(a), as_float(b))
    return torch.linalg.solve_triangular(a, b, upper=not lower)


def np_linalg_svd(a: Tensor, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    return tuple(torch.linalg.svd(a, full_matrices)) if compute_uv else torch.linalg.svdvals(a)


# --- Functions by SciPy's names -------------------------------------------------------------------


def _softmax(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axis=-1: (
        of(x, axis) if axis is not None else of(x.reshape(-1), 0).reshape(x.shape)
    )


np_softmax, np_log_softmax = _softmax(torch.softmax), _softmax(torch.log_softmax)


def np_softplus(x: Tensor) -> Tensor:
    # torch's default of 20 omits terms that a float64 shows
    return torch.nn.functional.softplus(x, threshold=40.0)


def np_one_hot(x: Tensor, num_classes: int, *, dtype: Any = None, axis: int = -1) -> Tensor:
    classes = torch.arange(num_classes, device=x.device)
    encoded = torch.movedim(x.unsqueeze(-1) == classes, -1, axis)
    return encoded.to(torch.get_default_dtype() if dtype is None else dtype_of(dtype))


def np_special_gamma(z: Tensor) -> Tensor:
    sign = torch.where((z < 0) & (torch.floor(z) % 2 != 0), -1.0, 1.0).to(z.dtype)
    return sign * torch.exp(torch.lgamma(z))


# --- New tensors, within f and grad_fn on the device of the op's first tensor ---------------------


def _filled(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda shape, dtype=None: of(shape, dtype=dtype_of(dtype), device=device_of_call())


np_zeros, np_ones = _filled(torch.zeros), _filled(torch.ones)


def _filled_like(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda a, dtype=None: of(a) if dtype is None else of(a, dtype=dtype_of(dtype))


np_zeros_like, np_ones_like = _filled_like(torch.zeros_like), _filled_like(torch.ones_like)


def np_full(shape: Any, fill_value: Any, dtype: Any = None) -> Tensor:
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if isinstance(fill_value, torch.Tensor):  # torch.full would read it as a constant
        return torch.broadcast_to(fill_value, sizes).to(dtype_of(dtype) or fill_value.dtype)
    return torch.full(sizes, fill_value, dtype=dtype_of(dtype), device=device_of_call())


def np_arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    start, stop = (0, start) if stop is None else (start, stop)
    return torch.arange(start, stop, step, dtype=dtype_of(dtype), device=device_of_call())


def np_linspace(
    start: Any, stop: Any, num: int = 50, endpoint: bool = True, *, dtype: Any = None
) -> Tensor:
    stop = stop if endpoint else stop - (stop - start) / num
    ends = [end for end in (start, stop) if isinstance(end, torch.Tensor)]
    if not ends:
        return torch.linspace(start, stop, num, dtype=dtype_of(dtype), device=device_of_call())
    # torch.linspace would read them as constants
    steps = torch.linspace(0, 1, num, dtype=as_float(ends[0]).dtype, device=ends[0].device)
    steps = steps.reshape(-1, *[1] * max(end.ndim for end in ends))
    between = start * (1 - steps) + stop * steps
    return between if dtype is None else between.to(dtype_of(dtype))


def _frequencies(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda n, d=1.0: of(n, d, device=device_of_call())


np_fft_fftfreq, np_fft_rfftfreq = _frequencies(torch.fft.fftfreq), _frequencies(torch.fft.rfftfreq)
