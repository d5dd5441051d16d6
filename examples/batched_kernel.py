"""A kernel that has its own way with a batch: many vectors times one matrix are one product.

vmap calls the rule for batches once, where it would map a kernel that it cannot look into, or
refuse it. The rule returns what f returns, for the whole batch: the gradient of the matrix, which
has no batch, is the sum.
"""

import importlib

import numpy as np

from cgshim import (
    config_backend,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_grad,
    op_matmul,
    op_stack,
    op_sum,
    op_transpose,
)

launches = []


def kernel(matrix, x):
    """Stands for a kernel in Triton, Pallas or C++: a matrix times a vector, or times the columns of another."""
    launches.append(x.shape)
    return op_matmul(matrix, x)


def of_batch(size, in_batched, matrix, x):
    matrix_is, x_is = in_batched
    if matrix_is:  # a product for each element, as where each has a gradient of its own

        def grad_of_each(upstream):
            of_x = op_matmul(upstream[:, None, :], matrix)[:, 0, :]
            return upstream[:, :, None] * x[..., None, :], of_x if x_is else op_sum(of_x, axis=0)

        return kernel(matrix, x[..., None])[..., 0], grad_of_each, True

    def grad(upstream):
        return op_matmul(op_transpose(upstream), x), op_matmul(upstream, matrix)

    return op_transpose(kernel(matrix, op_transpose(x))), grad, True


@op_custom_gradient(vmap=of_batch)
def apply(matrix, x):
    def grad(upstream):
        return upstream[:, None] * x[None, :], op_matmul(op_transpose(matrix), upstream)

    return kernel(matrix, x), grad


def mapped(f, xs):
    """f over the rows of xs, by the framework's own vmap; NumPy has none."""
    if config_backend() == "jax":
        return importlib.import_module("jax").vmap(f)(xs)
    if config_backend() == "torch":
        return importlib.import_module("torch").func.vmap(f)(xs)
    if config_backend() == "tensorflow":
        return importlib.import_module("tensorflow").vectorized_map(f, xs)
    return op_stack([f(x) for x in xs])


def misfit(matrix, xs, measured):
    return op_sum((mapped(lambda x: apply(matrix, x), xs) - measured) ** 2)


def main():
    generator = np.random.default_rng(0)
    matrix, xs, measured = (
        op_convert_to_tensor(generator.standard_normal(shape), "float32")
        for shape in ((2, 3), (100, 3), (100, 2))
    )
    print("misfit of the batch", np.round(op_convert_to_numpy(misfit(matrix, xs, measured)), 2))
    print("its gradient")
    print(np.round(op_convert_to_numpy(op_grad(misfit)(matrix, xs, measured)), 2))


if __name__ == "__main__":
    main()
