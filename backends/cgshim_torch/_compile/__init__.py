"""PyTorch: calls that Dynamo traces (`calls`, with its `guards` and `trees`), and those in graphs for
export (`staged`). `dynamo` is what is asked of Dynamo, whose import takes a second.
"""
