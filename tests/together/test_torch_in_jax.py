"""The PyTorch network in a JAX program: what JAX does with it is what PyTorch does with it."""

import re

import numpy as np
import pytest

from cgshim import use_backend


@pytest.fixture
def training():
    """All that a step takes: weights, images, labels."""
    import jax.numpy as jnp
    from torch_in_jax import digits, first_weights

    (images, labels), _ = digits()
    return first_weights(), jnp.asarray(images[:50]), jnp.asarray(labels[:50])


def test_it_prints_what_the_cookbook_says(capsys):
    from test_printed import documented, words_and_numbers
    from torch_in_jax import main

    main()
    words, numbers = words_and_numbers(capsys.readouterr().out)
    expected_words, expected_numbers = words_and_numbers(documented("torch_in_jax"))
    assert words == expected_words
    np.testing.assert_allclose(numbers, expected_numbers, rtol=0.05)
    (before, _), *trained = zip(numbers[::2], numbers[1::2], strict=True)
    assert len({right for _, right in trained}) == 1
    assert all(loss < before / 10 for loss, _ in trained)


def test_another_backend_is_refused():
    from torch_in_jax import main

    expected = (
        "torch_in_jax.py: the program around the network is JAX's, got the backend torch; "
        "set CGSHIM_BACKEND=jax, or leave it out"
    )
    with use_backend("torch"), pytest.raises(SystemExit, match=re.escape(expected)):
        main()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_step_is_that_of_pytorch(compiled, training):
    import jax
    import torch
    from torch_in_jax import RATE, network_with, step

    weights, images, labels = training
    found = (jax.jit(step) if compiled else step)(weights, images, labels)

    in_torch = network_with(weights)
    arrays = [torch.tensor(np.asarray(array)) for array in (images, labels)]
    torch.nn.functional.cross_entropy(in_torch(arrays[0]), arrays[1]).backward()
    torch.optim.SGD(in_torch.parameters(), lr=RATE).step()
    assert found.keys() == dict(in_torch.named_parameters()).keys()
    for name, expected in in_torch.named_parameters():
        np.testing.assert_allclose(
            found[name], expected.detach(), rtol=1e-5, atol=1e-6, err_msg=name
        )


def test_a_compiled_step_runs_the_network_once(training):
    import jax
    from torch_in_jax import network, step

    compiled = jax.jit(step)
    jax.block_until_ready(compiled(*training))
    runs = []
    hook = network.register_forward_hook(lambda *_: runs.append("run"))
    jax.block_until_ready(compiled(*training))
    hook.remove()
    assert runs == ["run"]


def test_training_leaves_the_network_as_it_is(training):
    from torch_in_jax import first_weights, step

    step(*training)
    for name, weight in first_weights().items():
        np.testing.assert_array_equal(weight, training[0][name])
