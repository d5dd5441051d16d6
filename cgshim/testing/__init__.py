"""For the tests of ops and of backends: what cgshim tests itself with, public."""

from cgshim.testing import conformance as conformance
from cgshim.testing._check import check_gradients as check_gradients
