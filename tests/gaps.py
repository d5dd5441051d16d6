"""What a framework cannot give: a row is a strict xfail, so that it goes when its reason does. At most five rows."""

GAPS: dict[tuple[str, str], str] = {
    ("tensorflow", "test_a_rule_that_may_not_be_linear_is_refused_around_a_function_in_a_function"): (
        "a ForwardAccumulator within a tf.function transposes another tf.function without telling that it does: "
        "https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/forwardprop.py"
    ),
    ("torch", "test_a_second_order_is_never_dropped[eager]"): (
        "torch.compile loses second orders silently: with backend='eager' the backward of any Function has no graph; "
        "https://github.com/pytorch/pytorch/issues/91469"
    ),
    ("torch", "test_a_second_order_is_never_dropped[aot_eager]"): (
        "torch.compile loses the second order of a graph whose backward reads none of its inputs, as that of an op "
        "whose rule keeps what f made of them; inductor refuses it; mended after 2.13: "
        "https://github.com/pytorch/pytorch/issues/181581"
    ),
}
"""(backend, test or conformance case): the reason, with the framework's own issue"""
