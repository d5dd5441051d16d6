"""The option --picture PATH, which the examples with a picture share; matplotlib is needed for it
alone.
"""

import argparse
from contextlib import contextmanager


def picture_path():
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", metavar="PATH", help="save a picture here (needs matplotlib)")
    return parser.parse_args().picture


@contextmanager
def panels(path, columns, *, width=4.0, height=3.4):
    """Axes side by side, saved at path when all is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(width * columns, height), layout="constrained"
    )
    yield axes
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
