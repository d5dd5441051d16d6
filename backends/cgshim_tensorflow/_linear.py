"""A look at whether a rule is linear in upstream: it is, if each of its operations on upstream is known to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cgshim_tensorflow._origins import is_of_accumulator
from cgshim_tensorflow._values import is_differentiable, is_eager

Tensor = Any
Attributes = Any


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SHAPES = _named("BroadcastGradientArgs OnesLike Rank Shape ShapeN Size VariableShape ZerosLike")
"""these read a tensor's shape and not its values"""

_NOT_LINEAR = _named("""
    Abs ArgMax ArgMin Atan Atan2 Ceil ClipByValue ComplexAbs Cos Cosh Digamma EagerPyFunc Elu Equal Erf Erfc Exp Expm1
    Floor FloorDiv FloorMod Greater GreaterEqual Inv IsFinite IsInf IsNan L2Loss LeakyRelu Less LessEqual Lgamma Log
    Log1p LogSoftmax Max Maximum Min Minimum Mod NotEqual PreventGradient Prod PyFunc PyFuncStateless Reciprocal Relu
    Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Square SquaredDifference
    StopGradient Tan Tanh TopKV2 TruncateDiv TruncateMod
""")
"""these are known not to be linear, whatever the author promised"""

_FIRST = _named("""
    AvgPool AvgPool3D BatchToSpace BatchToSpaceND BroadcastTo CheckNumerics Conj ConjugateTranspose Cumsum DepthToSpace
    Diag DiagPart Div DivNoNan DynamicPartition EluGrad EnsureShape ExpandDims FFT FFT2D FFT3D FusedBatchNormGradV3
    Gather GatherNd GatherV2 IFFT IFFT2D IFFT3D IRFFT IRFFT2D IRFFT3D Identity Imag LRNGrad LeakyReluGrad MatrixBandPart
    MatrixDiag MatrixDiagPart MatrixDiagPartV2 MatrixDiagPartV3 MatrixDiagV2 MatrixDiagV3 Mean MirrorPad MirrorPadGrad
    Neg Pad RFFT RFFT2D RFFT3D Real RealDiv Relu6Grad ReluGrad Reshape ResizeBicubic ResizeBilinear Reverse
    ReverseSequence ReverseV2 Roll SegmentMean SegmentSum SeluGrad Slice Snapshot SoftplusGrad SoftsignGrad SpaceToBatch
    SpaceToBatchND SpaceToDepth SplitV Squeeze StridedSlice Sum Tile Transpose Unpack UnsortedSegmentSum Xdivy
""")
_SECOND = _named("""
    AvgPoolGrad InvGrad MatrixSolve MatrixTriangularSolve ReciprocalGrad RsqrtGrad SigmoidGrad Split SqrtGrad ScatterNd
    TanhGrad
""")
_IN_EITHER = _named("""
    BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv3D Cross DepthwiseConv2dNative Einsum MatMul Mul MulNoNan
""")
_TOGETHER = _named("Add AddN AddV2 BiasAdd Complex Pack Sub")


class _Linear(NamedTuple):
    """The inputs in which an operation is linear."""

    groups: tuple[slice, ...]
    """it is linear in one group of inputs at a time, if the others are constant"""
    together: bool = False
    """it is linear in a group as a whole: if one of them is constant, and not zero, it is affine"""
    underived: int | None = None
    """the input for which TensorFlow has no derivative, though the operation is linear in it too"""


def _at(*places: int) -> tuple[slice, ...]:
    return tuple([slice(place, place + 1) for place in places])


_LINEAR: dict[str, _Linear] = {
    **dict.fromkeys(_FIRST, _Linear(_at(0))),
    **dict.fromkeys(_SECOND, _Linear(_at(1))),
    **dict.fromkeys(_IN_EITHER, _Linear(_at(0, 1))),
    **dict.fromkeys(_TOGETHER, _Linear((slice(None),), together=True)),
    **dict.fromkeys(["Select", "SelectV2"], _Linear((slice(1, 3),), together=True)),
    "ConcatV2": _Linear((slice(0, -1),), together=True),
    "Conv2DBackpropFilter": _Linear(_at(0, 2)),
    "Conv2DBackpropInput": _Linear(_at(1, 2)),
    "Conv3DBackpropFilterV2": _Linear(_at(0, 2)),
    "Conv3DBackpropInputV2": _Linear(_at(1, 2)),
    "DepthwiseConv2dNativeBackpropFilter": _Linear(_at(0, 2)),
    "DepthwiseConv2dNativeBackpropInput": _Linear(_at(1, 2)),
    "MaxPoolGrad": _Linear(_at(2)),
    "PadV2": _Linear((slice(0, 3, 2),), together=True, underived=2),
    "SparseTensorDenseMatMul": _Linear(_at(1, 3)),
    "StridedSliceGrad": _Linear(_at(4)),
    "TensorScatterAdd": _Linear((slice(0, 3, 2),), together=True),
    "TensorScatterUpdate": _Linear((slice(0, 3, 2),), together=True),
}

_OF_EACH = ("Cast", "IdentityN")
"""these are linear, but for what becomes an integer"""


class Linearity:
    """What the operations of a rule show, one after the other."""

    def __init__(self, upstreams: Iterable[Tensor]) -> None:
        self._linear = {upstream._id for upstream in upstreams if is_differentiable(upstream)}
        self._faults: dict[int, str] = {}
        self._doubts: dict[int, str] = {}
        self._zeros: set[int] = set()
        self.fault: str | None = None
        """what shows that the rule is not linear, if anything does"""
        self.doubt: str | None = None
        """an operation on upstream that is not known to be linear, if there is one"""

    def notice(self, op_type: str, inputs: Sequence[Tensor], attributes: Attributes, outputs: Sequence[Tensor]) -> None:
        """Look at one operation of the rule."""
        if op_type == "ZerosLike":
            self._zeros.update([output._id for output in outputs])
        if op_type in _SHAPES or is_of_accumulator(op_type, attributes):
            return
        for known in (self._faults, self._doubts):
            because = next((known[x._id] for x in inputs if x._id in known), None)
            if because is not None:
                known.update(dict.fromkeys([output._id for output in outputs], because))
                return
        places = [at for at, x in enumerate(inputs) if x._id in self._linear]
        if places:
            self._judge(op_type, inputs, places, outputs)

    def _judge(self, op_type: str, inputs: Sequence[Tensor], places: Sequence[int], outputs: Sequence[Tensor]) -> None:
        made = [output._id for output in outputs]
        if op_type in _OF_EACH:
            self._linear.update([output._id for output in outputs if is_differentiable(output)])
            self._faults.update({output._id: op_type for output in outputs if not is_differentiable(output)})
        elif op_type in _LINEAR and self._is_linear_in(_LINEAR[op_type], inputs, places):
            self._linear.update(made)
        else:
            self.doubt = self.doubt or op_type
            found = self._faults if op_type in _NOT_LINEAR or op_type in _LINEAR else self._doubts
            found.update(dict.fromkeys(made, op_type))

    def _is_linear_in(self, known: _Linear, inputs: Sequence[Tensor], places: Sequence[int]) -> bool:
        if known.underived in places:
            return False
        for group in known.groups:
            inside = range(len(inputs))[group]
            if set(places) <= set(inside):
                return not known.together or all(at in places or self._is_zero(inputs[at]) for at in inside)
        return False

    def conclude(self, gradients: Iterable[Tensor | None]) -> None:
        """Look at what the rule has returned."""
        for gradient in gradients:
            if gradient is None or not is_differentiable(gradient) or gradient._id in self._linear:
                continue
            if gradient._id in self._doubts:
                self.doubt = self.doubt or self._doubts[gradient._id]
            elif gradient._id in self._faults:
                self.fault = f"{self._faults[gradient._id]} in the rule"
            elif not self._is_zero(gradient):
                self.fault = "a gradient that does not depend on upstream"

    def _is_zero(self, tensor: Tensor) -> bool:
        if tensor._id in self._zeros:
            return True
        value = tensor.numpy() if is_eager(tensor) else tf.get_static_value(tensor)
        return value is not None and not np.any(value)
