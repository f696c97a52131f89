"""A pool under random operations and faults, against the model of `support.pool_machine`."""

from hypothesis import HealthCheck, settings
from support.pool_machine import PoolMachine

PoolMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
)
TestPool = PoolMachine.TestCase
