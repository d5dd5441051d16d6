"""Everything that a backend may import from cgshim: see docs/writing-a-backend.md.

cgshim.host and cgshim.ops import only this from the front end, so they could be separate libraries.
"""

from cgshim._axes import Axis as Axis, axes_of as axes_of, checked_axis as checked_axis
from cgshim._batches import Mapped as Mapped, WithBatches as WithBatches
from cgshim._call import (
    Call as Call,
    WithoutDerivative as WithoutDerivative,
    checked_pair as checked_pair,
    has_no_derivative as has_no_derivative,
    output_without_rule as output_without_rule,
    refuse_without_tensor as refuse_without_tensor,
)
from cgshim._closure import (
    SIMPLE as SIMPLE,
    Converted as Converted,
    Rebuild as Rebuild,
    closure_convert as closure_convert,
    tensors_inside as tensors_inside,
)
from cgshim._dispatch import (
    backend_or_numpy as backend_or_numpy,
    backend_to_convert_to as backend_to_convert_to,
    choice_for_plans as choice_for_plans,
    framework_of as framework_of,
    framework_of_type as framework_of_type,
    is_in_op as is_in_op,
    is_in_rule as is_in_rule,
    is_lasting as is_lasting,
    on_numpy as on_numpy,
    tensor_of_call as tensor_of_call,
    use_backend as use_backend,
    value_of as value_of,
)
from cgshim._dtypes import (
    dtype_name as dtype_name,
    is_complex as is_complex,
    is_differentiable as is_differentiable,
    is_dtype as is_dtype,
)
from cgshim._errors import (
    BackendError as BackendError,
    CustomGradientError as CustomGradientError,
    CustomGradientTypeError as CustomGradientTypeError,
    CustomGradientValueError as CustomGradientValueError,
    TransformationError as TransformationError,
    describe as describe,
    describe_spec as describe_spec,
    describe_tree as describe_tree,
    function_name as function_name,
    refusal as refusal,
    sentence as sentence,
    shape_of as shape_of,
)
from cgshim._foreign import (
    KERAS as KERAS,
    constant_when_traced as constant_when_traced,
    converted_as_caller as converted_as_caller,
    is_traced as is_traced,
    not_converted as not_converted,
)
from cgshim._gradients import Arguments as Arguments
from cgshim._op import CustomGradient as CustomGradient
from cgshim._protocol import Backend as Backend, Tensor as Tensor
from cgshim._pytree import (
    ONE_TENSOR as ONE_TENSOR,
    SLOT as SLOT,
    TreeSpec as TreeSpec,
    as_tensor as as_tensor,
    combine_each as combine_each,
    partition as partition,
    partition_each as partition_each,
    subvals as subvals,
    told_apart as told_apart,
    with_leaves as with_leaves,
)
from cgshim._registry import (
    available_backends as available_backends,
    imported_when_called as imported_when_called,
    load as load,
    name_of as name_of,
)
from cgshim._rule import (
    Rule as Rule,
    RuleSignature as RuleSignature,
    refuse_captured_tangent as refuse_captured_tangent,
)
from cgshim._scope import RuleScope as RuleScope
from cgshim._signature import Parameters as Parameters
from cgshim._transforms import op_vjp as op_vjp
