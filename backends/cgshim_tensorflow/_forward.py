"""Forward mode: the transpose of a rule, which has to be seen to be linear in upstream.

It is linear if each of its operations on upstream is known to be; in eager mode its numbers have to
be proportional to upstream, too, for a rule may read them in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from cgshim.backend import Call, RuleScope, Tensor, is_differentiable
from cgshim_tensorflow._private import FunctionGradients, function_in, pack_tangents, tapes
from cgshim_tensorflow._record import attributes_of, is_of_accumulator, listening_with, running_rule
from cgshim_tensorflow._values import is_eager, values_of

Backward = Callable[..., Sequence[Tensor | None]]
"""takes one upstream gradient for each output, None if it was not used; returns one gradient for each source"""


class Transposition:
    """The runs of rules by which an accumulator transposes them: each is observed, and judged when
    all are done.
    """

    def __init__(self, is_of_function: bool = False) -> None:
        self._seen: list[tuple[Call, Linearity]] = []
        self.is_of_function = is_of_function
        """whether a whole tf.function is transposed, whose second derivatives are built with the first"""

    def run(self, transpose: Callable[..., Any], *args: Any) -> Any:
        """Let an accumulator run rules; raise an error at the end for one that is not linear."""
        result = transposition.run(self, transpose, *args)
        for call, linearity in self._seen:
            judge(call, linearity)
        return result

    def observe(
        self, call: Call, rule: Callable[..., Sequence[Tensor | None]], upstreams: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run the rule, observe its operations, and return its gradients."""
        linearity = Linearity()
        self._seen.append((call, linearity))
        # a rule within the rule is not this one
        return transposition.run(None, linearity.observe, rule, upstreams)


def judge(call: Call, linearity: Linearity) -> None:
    """Raise an error for a rule that is not linear, or that may not be and was not promised to be."""
    if not call.forward_mode and (linearity.doubt or linearity.fault):
        call.refuse_forward_mode("tf.autodiff.ForwardAccumulator")
    if linearity.fault:
        call.refuse_nonlinear(linearity.fault)


transposition: RuleScope[Transposition | None] = RuleScope("cgshim_tensorflow_transposition")
"""the one that is going on, if an accumulator is running the rule"""


@functools.cache
def observe_functions() -> None:
    """Observe the rules in each tf.function that an accumulator transposes from now on, while it
    builds what gives the function's tangents.
    """
    build = FunctionGradients._build_functions_for_outputs

    @functools.wraps(build)
    def observed(function: Any, outputs: Any, inference_args: Any, input_tangents: Any) -> Any:
        if not input_tangents:
            return build(function, outputs, inference_args, input_tangents)
        transposed = Transposition(is_of_function=True)
        return transposed.run(build, function, outputs, inference_args, input_tangents)

    FunctionGradients._build_functions_for_outputs = observed


@functools.cache
def observe_tapes() -> None:
    """Refuse from now on the tape that a rule opens while an accumulator transposes it: TensorFlow
    2.21 lets it record nothing, and its gradients would be None.
    """
    push = tapes.push_new_tape

    @functools.wraps(push)
    def observed(*args: Any, **options: Any) -> Any:
        rule = running_rule.current
        if rule and no_tape_records():
            rule.call.refuse("forward mode needs a rule that takes no derivative itself",
                             "op_vjp or a GradientTape in it", "use reverse mode")  # fmt: skip
        return push(*args, **options)

    tapes.push_new_tape = observed


def no_tape_records() -> bool:
    """Return True while an accumulator transposes what runs."""
    return bool(pack_tangents(()).indices) and not running_rule.run(None, _tapes_record)


def _tapes_record() -> bool:
    with tf.GradientTape() as tape:
        x = tf.constant(0.0)
        tape.watch(x)
        y = tf.identity(x)
    return tape.gradient(y, x) is not None


# --- Which operations are linear, and in what -----------------------------------------------------


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


_SHAPES = _named("BroadcastGradientArgs OnesLike Rank Shape ShapeN Size VariableShape ZerosLike")
"""these read a tensor's shape and not its values"""

_NOT_LINEAR = _named("""
    Abs Acos Acosh ApproximateEqual ArgMax ArgMin Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e
    Betainc Ceil Cholesky ClipByValue ComplexAbs Cos Cosh Cumprod CumulativeLogsumexp Digamma EagerPyFunc Elu Equal Erf
    Erfc Erfinv Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual Igamma Igammac Inv InvertPermutation IsFinite
    IsInf IsNan L2Loss LeakyRelu Less LessEqual Lgamma Log Log1p LogMatrixDeterminant LogSoftmax MatrixDeterminant
    MatrixInverse Max MaxPool MaxPool3D Maximum Min Minimum Mod Multinomial Ndtri NextAfter NotEqual Polygamma Pow
    PreventGradient Prod PyFunc PyFuncStateless Qr Reciprocal Relu Relu6 Rint Round Rsqrt SegmentMax SegmentMin
    SegmentProd SelfAdjointEigV2 Selu Sigmoid Sign Sin Sinh Softmax SoftmaxCrossEntropyWithLogits Softplus Softsign
    SparseSoftmaxCrossEntropyWithLogits Sqrt Square SquaredDifference StopGradient Svd Tan Tanh TopKV2 TruncateDiv
    TruncateMod UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd Where Xlog1py Xlogy Zeta
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

_TOLERANCE = 1e-3
"""of the largest number: a linear rule may be a solver that stops early, or in 16 bits"""
_OF_EACH = ("Cast", "IdentityN")
"""these are linear, but for what becomes an integer"""


class Linearity:
    """What the operations of a rule show, one after the other."""

    def __init__(self) -> None:
        self._linear: set[int] = set()
        self._faults: dict[int, str] = {}
        self._doubts: dict[int, str] = {}
        self.fault: str | None = None
        """what shows that the rule is not linear, if anything does"""
        self.doubt: str | None = None
        """an operation on upstream that is not known to be linear, if there is one"""

    def observe(
        self, rule: Callable[..., Sequence[Tensor | None]], upstreams: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Run a rule, look at its operations, and return its gradients."""
        self._linear.update([u._id for u in upstreams if is_differentiable(u.dtype)])
        with listening_with(self.notice):
            gradients = rule(*upstreams)
        self.conclude(gradients)
        if tf.executing_eagerly() and not self.fault:
            scaled = rule(*[-2 * u if is_differentiable(u.dtype) else u for u in upstreams])
            self.require_homogeneous(gradients, scaled)
        return gradients

    @classmethod
    def of_graph(
        cls, graph: Any, upstreams: Iterable[Tensor], gradients: Iterable[Tensor]
    ) -> Linearity:
        """Return what the operations of a traced rule show."""
        linearity = cls()
        linearity._linear.update([u._id for u in upstreams if is_differentiable(u.dtype)])
        linearity._notice_each(graph)
        linearity.conclude(gradients)
        return linearity

    def notice(
        self, op_type: str, inputs: Sequence[Tensor], attributes: Any, outputs: Sequence[Tensor]
    ) -> None:
        """Look at one operation of the rule."""
        if not op_type or op_type in _SHAPES or is_of_accumulator(op_type, attributes):
            return
        for known in (self._faults, self._doubts):
            because = next((known[x._id] for x in inputs if x._id in known), None)
            if because is not None:
                known.update(dict.fromkeys([output._id for output in outputs], because))
                return
        places = [at for at, x in enumerate(inputs) if x._id in self._linear]
        if places and attributes and not is_eager(inputs[0]):
            self._look_into(attributes[1].name, inputs[0].graph, places, outputs)
        elif places:
            self._judge(op_type, inputs, places, outputs)

    def _look_into(
        self, function: str, graph: Any, places: Sequence[int], outputs: Sequence[Tensor]
    ) -> None:
        """Look at the operations of a function that the rule calls in a graph."""
        called = function_in(graph, function)
        if called is None:
            self._judge("PartitionedCall", (), places, outputs)
            return
        inner = Linearity()
        inner._linear.update([called.inputs[at]._id for at in places])
        inner._notice_each(called)
        self.doubt = self.doubt or inner.doubt
        # tapes have made a function return more since it was called here
        for mine, theirs in zip(outputs, called.outputs, strict=False):
            if theirs._id in inner._linear:
                self._linear.add(mine._id)
            for own, found in ((self._faults, inner._faults), (self._doubts, inner._doubts)):
                if theirs._id in found:
                    own[mine._id] = found[theirs._id]

    def _notice_each(self, graph: Any) -> None:
        for operation in graph.get_operations():
            self.notice(
                operation.type, operation.inputs, attributes_of(operation), operation.outputs
            )

    def _judge(
        self,
        op_type: str,
        inputs: Sequence[Tensor],
        places: Sequence[int],
        outputs: Sequence[Tensor],
    ) -> None:
        if op_type in _OF_EACH or (
            op_type in _LINEAR and self._is_linear_in(_LINEAR[op_type], inputs, places)
        ):
            self._linear.update(
                [output._id for output in outputs if is_differentiable(output.dtype)]
            )
            self._faults.update(
                {output._id: op_type for output in outputs if not is_differentiable(output.dtype)}
            )
        else:
            self.doubt = self.doubt or op_type
            reasons = self._faults if op_type in _NOT_LINEAR or op_type in _LINEAR else self._doubts
            reasons.update({output._id: op_type for output in outputs})

    def _is_linear_in(
        self, known: _Linear, inputs: Sequence[Tensor], places: Sequence[int]
    ) -> bool:
        if known.underived in places:
            return False
        for group in known.groups:
            inside = range(len(inputs))[group]
            if set(places) <= set(inside):
                return not known.together or all(
                    at in places or self._is_zero(inputs[at]) for at in inside
                )
        return False

    def conclude(self, gradients: Iterable[Tensor | None]) -> None:
        """Look at what the rule has returned."""
        known = {*self._linear, *self._doubts}
        for gradient in map(values_of, gradients):
            if gradient is None or not is_differentiable(gradient.dtype):
                continue
            if gradient._id in self._faults:
                self.fault = f"{self._faults[gradient._id]} in the rule"
            elif not (gradient._id in known or self._is_zero(gradient)):
                self.fault = "a gradient that does not depend on upstream"

    def require_homogeneous(
        self, gradients: Sequence[Tensor | None], at_minus_twice: Sequence[Tensor | None]
    ) -> None:
        """Look at what the rule has returned at an upstream, and at -2 times that: it has to be -2
        times as much.
        """
        for one, other in zip(gradients, at_minus_twice, strict=True):
            if one is None or other is None or not is_differentiable(one.dtype):
                continue
            once, twice = [tf.cast(values_of(x), tf.complex128).numpy() for x in (one, other)]
            size = np.max(np.abs(twice), initial=0.0, where=np.isfinite(twice))
            if not np.allclose(
                twice, -2.0 * once, rtol=0.0, atol=_TOLERANCE * size, equal_nan=True
            ):
                self.fault = "a gradient that is not proportional to upstream"

    def _is_zero(self, tensor: Tensor) -> bool:
        if not is_eager(tensor) and tensor.op.type == "ZerosLike":
            return True
        value = tf.get_static_value(tensor)
        return value is not None and not np.any(value)
