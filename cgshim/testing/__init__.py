"""Helpers for tests of ops and backends: the public part of cgshim's own tests."""

from cgshim.testing import conformance as conformance
from cgshim.testing._check import check_gradients as check_gradients
