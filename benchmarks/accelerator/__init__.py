"""Tests and measurements of jaxvec on a GPU, within ten minutes: `python -m benchmarks.accelerator`."""
