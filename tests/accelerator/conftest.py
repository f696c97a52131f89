"""Fixtures of the tests for GPUs: a driver that stands in for CUDA's where there is no GPU."""

from support.fake_cuda import _registered, built, cpu_as_cuda, driver

__all__ = ["_registered", "built", "cpu_as_cuda", "driver"]
