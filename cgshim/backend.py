"""The names of the backend protocol: see docs/writing-a-backend.md."""

from cgshim._axes import Axis as Axis, axes_of as axes_of
from cgshim._batches import Mapped as Mapped, WithBatches as WithBatches
from cgshim._call import (
    Call as Call,
    has_no_derivative as has_no_derivative,
    output_without_rule as output_without_rule,
)
from cgshim._closure import (
    Converted as Converted,
    Rebuild as Rebuild,
    closure_convert as closure_convert,
    tensors_inside as tensors_inside,
)
from cgshim._dispatch import (
    is_in_op as is_in_op,
    is_in_rule as is_in_rule,
    tensor_of_call as tensor_of_call,
)
from cgshim._dtypes import dtype_name as dtype_name, is_differentiable as is_differentiable
from cgshim._errors import (
    BackendError as BackendError,
    CustomGradientError as CustomGradientError,
    CustomGradientTypeError as CustomGradientTypeError,
    CustomGradientValueError as CustomGradientValueError,
    TransformationError as TransformationError,
    describe as describe,
    refusal as refusal,
)
from cgshim._protocol import Backend as Backend, Tensor as Tensor
from cgshim._pytree import subvals as subvals
from cgshim._registry import imported_when_called as imported_when_called
from cgshim._rule import Rule as Rule, refuse_captured_tangent as refuse_captured_tangent
