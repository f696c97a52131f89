"""Benchmarks that compare jaxvec with other systems in one run. They are not part of the package."""
