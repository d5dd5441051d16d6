"""The tests' own test: small mistakes planted in the package, one at a time, and whether the tests notice."""
