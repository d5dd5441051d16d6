"""cgshim's own cases, and the table of what MLX cannot."""

import pytest

from cgshim.testing import conformance

NO_COMPLEX128 = "MLX has complex64 alone: https://ml-explore.github.io/mlx/build/html/python/data_types.html"
GAPS = {"dtypes[complex128]": NO_COMPLEX128, "complex_numbers[complex128]": NO_COMPLEX128}


@pytest.mark.parametrize("case", conformance.cases("mlx", gaps=GAPS))
def test_conformance(case):
    case()
