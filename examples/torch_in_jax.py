"""A PyTorch network inside jax.jit: trained by JAX, and then used by PyTorch.

`op_host(..., backend="torch")` makes an op of the network, as a function of its weights and of
images. The loss and the steps are JAX's, the derivatives of the network are PyTorch's own. This
example needs both, and runs on JAX alone.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import torch
from _training import digits

from cgshim import Spec, config_backend, op_host

STEPS, RATE = 100, 1.0

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))


@op_host(outputs=lambda weights, images: Spec((images.shape[0], 10), images.dtype), backend="torch")
def classify(weights, images):
    return torch.func.functional_call(network, weights, images)


def loss(weights, images, labels):
    """The cross entropy, in JAX."""
    return -jax.nn.log_softmax(classify(weights, images))[jnp.arange(len(labels)), labels].mean()


def step(weights, images, labels):
    """The weights after a step down the gradient of the loss."""
    gradient = jax.grad(loss)(weights, images, labels)
    return jax.tree.map(lambda weight, slope: weight - RATE * slope, weights, gradient)


def train(step, images, labels):
    weights = first_weights()
    for _ in range(STEPS):
        weights = step(weights, images, labels)
    return weights


def first_weights():
    return {name: jnp.array(weight.detach().numpy()) for name, weight in network.named_parameters()}


def network_with(weights):
    """The network as PyTorch has it, with these weights."""
    trained = copy.deepcopy(network)
    trained.load_state_dict(
        {name: torch.tensor(np.asarray(weight)) for name, weight in weights.items()}
    )
    return trained


def main():
    if config_backend() not in (None, "jax"):
        raise SystemExit("torch_in_jax.py: the program around the network is JAX's, got the backend "
                         f"{config_backend()}; set CGSHIM_BACKEND=jax, or leave it out")  # fmt: skip
    (images, labels), (unseen, unseen_labels) = digits()
    training = [jnp.asarray(images), jnp.asarray(labels)]
    trained = {"JAX": train(step, *training), "jax.jit": train(jax.jit(step), *training)}

    def show(name, value, logits):
        print(
            f"{name:20}{float(value):8.4f}{np.mean(np.asarray(logits).argmax(-1) == unseen_labels):20.1%}"
        )

    print("                       loss  unseen digits right")
    for name, weights in {"before": first_weights(), **trained}.items():
        show(name, loss(weights, *training), classify(weights, jnp.asarray(unseen)))
    in_torch = network_with(trained["jax.jit"])
    with torch.no_grad():
        of_training = torch.nn.functional.cross_entropy(
            in_torch(torch.tensor(images)), torch.tensor(labels)
        )
        show("the same in PyTorch", of_training, in_torch(torch.tensor(unseen)))


if __name__ == "__main__":
    main()
