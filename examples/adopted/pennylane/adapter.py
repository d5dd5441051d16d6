"""PennyLane's interfaces, written once: what `pennylane/workflow/interfaces/` could be.

A batch of circuits is an op of their trainable parameters. Its rules are those of a
`JacobianProductCalculator`: a device's own, or a gradient transform such as the parameter shift.
"""

import sys
from functools import cache, partial
from itertools import compress

import autograd
import numpy as np
import pennylane as qp
from pennylane.math import Interface
from pennylane.workflow.interfaces.jax_jit import _result_shape_dtype_struct as result_specs
from pennylane.workflow.jacobian_products import TransformJacobianProducts, _compute_jvps

from cgshim import op_conj, op_convert_to_tensor, op_custom_gradient, op_tree_map, use_backend

BACKENDS = {
    Interface.AUTOGRAD: "numpy",
    Interface.TORCH: "torch",
    Interface.TF: "tensorflow",
    Interface.TF_AUTOGRAPH: "tensorflow",
}


def install():
    """Put this module in the place of PennyLane's interfaces."""
    run = sys.modules["pennylane.workflow.run"]
    run._get_ml_boundary_execute = get_ml_boundary_execute
    # the pipeline of tf.function is that of all others
    run._construct_tf_autograph_pipeline = lambda *args: run._construct_ml_execution_pipeline(*args)


def get_ml_boundary_execute(config, differentiable=False):
    """Return the function that runs circuits within this framework's programs."""
    backend = BACKENDS.get(config.interface, "jax")
    compiled = config.interface is Interface.TF_AUTOGRAPH or (
        config.interface is Interface.JAX_JIT and config.convert_to_numpy
    )
    numpy_vjp = backend == "jax" and config.use_device_jacobian_product
    on_values = config.convert_to_numpy and not differentiable
    run = partial(execute, backend=backend, on_host=compiled or numpy_vjp, on_values=on_values)
    if config.interface is not Interface.TF_AUTOGRAPH:
        return run
    # `run` names the arguments of this one otherwise
    return lambda tapes, device, jpc, execute_fn, *_, **__: run(tapes, execute_fn, jpc, device)


def execute(tapes, execute_fn, jpc, device, *, backend, on_host, on_values):
    """Run circuits, of NumPy's numbers unless they are differentiated once more.

    In compiled programs they run on the host.
    """
    if backend != "jax":  # there `run` has done it
        # of copies: for a second order, those who made the circuits need their own
        tapes = [
            with_trainable(tape, qp.math.get_trainable_indices(tape.get_parameters(False)))
            for tape in tapes
        ]

    batch = Batch(tapes, execute_fn, jpc)

    def circuits(*parameters):
        if on_host:
            # where cgshim's arrays are read-only: lightning's kernels in C++ take none that is
            parameters = op_tree_map(np.array, parameters)
        elif on_values:
            parameters = qp.math.unwrap(parameters)
        jpc, bound = batch.jpc, batch.bound(parameters)

        @cache  # as jpc remembers the derivatives of a circuit by its identity
        def trainable(needed):
            if all(map(all, needed)):
                return bound
            return tuple(
                with_trainable(tape, compress(tape.trainable_params, flags))
                for tape, flags in zip(bound, needed, strict=True)
            )

        def grad(upstream, needs_input_grad):
            vjps = jpc.compute_vjp(trainable(needs_input_grad), conjugates(upstream))
            return tuple(map(spread, vjps, needs_input_grad))

        def jvp(*tangents):
            # PennyLane wants one of each parameter, of a number in a gate too
            tangents = tuple(
                tuple(0.0 * x if t is None else t for t, x in zip(each, values, strict=True))
                for each, values in zip(tangents, parameters, strict=True)
            )
            if on_host:
                return _compute_jvps(jpc.compute_jacobian(bound), tangents, bound)
            return tensors(jpc.execute_and_compute_jvp(bound, tangents)[1])

        convert = np.asarray if on_host else op_convert_to_tensor
        return tensors(batch.execute_fn(bound), convert), grad, jvp

    specs = None
    if on_host:
        if isinstance(jpc, TransformJacobianProducts):
            jpc._cache_full_jacobian = True
        refuse_counts(tapes)
        specs = tuple(result_specs(tape, device) for tape in tapes)
    run = op_custom_gradient(circuits, host_outputs=specs, forward_mode=True)
    with use_backend(backend):
        results = run(*(tuple(tape.get_parameters()) for tape in tapes))
    return sequences(results) if backend == "numpy" else results


class Batch:
    """Circuits, and what runs and differentiates them."""

    def __init__(self, tapes, execute_fn, jpc):
        self.tapes, self.execute_fn, self.jpc = tapes, execute_fn, jpc

    def bound(self, parameters):
        """Return the circuits with other parameters."""
        return tuple(
            tape.bind_new_parameters(values, tape.trainable_params)
            for tape, values in zip(self.tapes, parameters, strict=True)
        )


def refuse_counts(tapes):
    """Refuse counts whose keys nobody knows before they are counted."""
    for measurement in (each for tape in tapes for each in tape.measurements):
        if isinstance(measurement, qp.measurements.CountsMP) and not measurement.all_outcomes:
            raise NotImplementedError("The JAX-JIT interface doesn't support qp.counts.")


def with_trainable(tape, indices):
    """Return the circuit with these of its parameters trainable."""
    copy = tape.copy()
    copy.trainable_params = list(indices)
    return copy


def conjugates(upstream):
    """Return upstream gradients as PennyLane's, dL/dz."""
    if isinstance(upstream, (tuple, list)):
        return tuple(map(conjugates, upstream))
    return op_conj(upstream)


def spread(vjp, needed):
    """Return a gradient dL/dx + i dL/dy for each parameter, of those that were needed."""
    gradients = iter(() if vjp is None else vjp)
    return tuple(op_conj(next(gradients)) if need else None for need in needed)


def sequences(results):
    """Return nested results as autograd's tuples, which its functions stack."""
    if isinstance(results, tuple):
        return autograd.builtins.tuple(tuple(map(sequences, results)))
    return results


def tensors(results, convert=op_convert_to_tensor):
    """Return nested results as tensors; counts are dicts, and remain."""
    if isinstance(results, (tuple, list)):
        return tuple(tensors(result, convert) for result in results)
    return results if isinstance(results, dict) else convert(results)
