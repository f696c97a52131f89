"""Compiles programs for described devices: XLA needs the description of a device, not the device.

What a device's own compiler makes of our programs shows here: whether it knows our call and takes what that
has, how often the call is there, what is copied around it. Whether it runs does not.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxvec
from jaxvec.testing import CountingEnv

NUM_ENVS = 4
LENGTH = 9
SHARD = PartitionSpec("envs")

# --- Programs of a handle and an action, and the number of jaxvec's calls in each --------------------


def step_twice(handle, action):
    handle, _ = jaxvec.step(handle, action)
    return jaxvec.step(handle, action + 1)


def step_unread(handle, action):
    return jaxvec.step(handle, action)[0]


def step_some(handle, action):
    return jaxvec.step(jax.tree.map(lambda x: x[::2], handle), action[::2])


def reset_some(handle, action):
    return jaxvec.reset(handle, mask=action > 0, seed=action)


def reset_by_key(handle, action):
    return jaxvec.reset(handle, seed=jax.random.key(action[0]), options={"a": 1})


def call(handle, action):
    return jaxvec.call(handle, "multiply", action, result_shape_dtypes=int)


def save(handle, action):
    return jaxvec.save(handle)


def restore(handle, action):
    handle, state = jaxvec.save(handle)
    return jaxvec.restore(handle, state[action])


def simulate(handle, action):
    handle, state = jaxvec.save(handle)
    return handle, jaxvec.simulate(handle, state, action)


def simulate_unread(handle, action):
    handle, state = jaxvec.save(handle)
    jaxvec.simulate(handle, state, action)
    return handle


def search(handle, action):
    """Simulates each env as many steps as its reward, and then steps it."""

    def look_ahead(state, action):
        def go_on(carry):
            return carry[1].reward[0] < 3

        def turn(carry):
            return jaxvec.simulate(handle, carry[0], action[None])

        return jax.lax.while_loop(go_on, turn, jaxvec.simulate(handle, state[None], action[None]))

    handle, state = jaxvec.save(handle)
    _, ahead = jax.vmap(look_ahead)(state, action)
    return jaxvec.step(handle, ahead.obs[:, 0, 3])


def restore_within_scan(handle, action):
    handle, state = jaxvec.save(handle)

    def body(handle, action):
        handle, timestep = jaxvec.step(handle, action)
        return jaxvec.restore(handle, state)[0], timestep.reward

    return jax.lax.scan(body, handle, jnp.stack([action] * LENGTH))


def scan(handle, action):
    return jax.lax.scan(lambda h, _: jaxvec.step(h, action), handle, length=LENGTH)


def fori_loop(handle, action):
    return jax.lax.fori_loop(0, LENGTH, lambda _, h: jaxvec.step(h, action)[0], handle)


def while_loop(handle, action):
    def go_on(carry):
        return carry[1].info["episode_length"].max() % 3 < 2

    return jax.lax.while_loop(go_on, lambda carry: jaxvec.step(carry[0], action), jaxvec.step(handle, action))


def cond(handle, action):
    return jax.lax.cond(action.sum() > 0, lambda h: scan(h, action), lambda h: scan(h, action + 1), handle)


def switch(handle, action):
    branches = [lambda h, i=i: jaxvec.step(h, action + i) for i in range(3)]
    return jax.lax.switch(action[0], branches, handle)


def vmap(handle, action):
    return jax.vmap(jaxvec.step)(*split(handle, action))


def vmap_of_scan(handle, action):
    return jax.vmap(scan)(*split(handle, action))


def scan_of_vmap(handle, action):
    handles, actions = split(handle, action)
    return jax.lax.scan(lambda h, _: jax.vmap(jaxvec.step)(h, actions), handles, length=LENGTH)


def split(handle, action):
    return jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), (handle, action))


def grad(handle, action):
    def loss(weight):
        _, timestep = jaxvec.step(handle, (action * weight).astype(int))
        return (timestep.reward * weight).sum()

    return jax.grad(loss)(1.0)


def grad_of_scan(handle, action):
    def loss(weight):
        def body(carry, _):
            handle, timestep = jaxvec.step(carry[0], (carry[1] * weight > 1).astype(int))
            return (handle, timestep.reward), timestep.reward * weight

        return jax.lax.scan(body, (handle, action.astype(float)), length=LENGTH)[1].sum()

    return jax.value_and_grad(loss)(1.0)


def jit_within(handle, action):
    return jax.jit(scan)(handle, action)


PROGRAMS: dict[Callable[..., Any], int] = {
    jaxvec.step: 1,
    step_twice: 2,
    step_unread: 1,
    step_some: 1,
    reset_some: 1,
    reset_by_key: 1,
    call: 1,
    save: 1,
    restore: 2,
    simulate: 2,
    simulate_unread: 1,
    search: 4,
    restore_within_scan: 3,
    scan: 1,
    fori_loop: 1,
    while_loop: 2,
    cond: 2,
    switch: 3,
    vmap: 1,
    vmap_of_scan: 1,
    scan_of_vmap: 1,
    grad: 1,
    grad_of_scan: 1,
    jit_within: 1,
}

each_program = pytest.mark.parametrize(
    ("program", "calls"), PROGRAMS.items(), ids=[program.__name__ for program in PROGRAMS]
)


def play_halves(handle, timestep):
    """Steps the envs of a pool with `batch_size` in turns, with two calls."""

    def body(carry, _):
        handle, timestep = carry
        handle = jaxvec.send(handle, timestep.obs[:, 1], timestep.info["env_id"])
        return jaxvec.recv(handle), timestep.reward

    return jax.lax.scan(body, (handle, timestep), length=LENGTH)


def forget(handle, action):
    """Steps, and discards the results."""
    jaxvec.step(handle, action)
    return action


def carry_more(carry, action):
    """Carries a large array through steps, which XLA should update in place."""

    def body(carry, _):
        handle, x = carry
        handle, timestep = jaxvec.step(handle, action)
        return (handle, x.at[0].add(timestep.reward.sum())), timestep.reward

    return jax.lax.scan(body, carry, length=LENGTH)


def with_much_to_compute(handle, action):
    """Surrounds the calls with operations that XLA captures into CUDA graphs."""

    def body(carry, _):
        handle, x = carry
        for _ in range(8):
            x = jnp.tanh(x @ x.T) * 0.5
        handle, timestep = jaxvec.step(handle, action + (x.sum() > 1e9).astype(int))
        return (handle, x + timestep.reward.mean() * 1e-3), timestep

    (handle, _), timesteps = jax.lax.scan(body, (handle, jnp.ones((64, 64)) * 0.01), length=9)
    return handle, timesteps


class ImageEnv(CountingEnv):
    """Returns observations that are too large for packing."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (100, 100), np.uint8)

    def _observe(self, action):
        return np.full((100, 100), action % 256, np.uint8)


# --- Devices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Devices:
    """Described devices.

    Attributes:
        devices: of the description.
        compile_lowered: returns what the device's compiler makes of a program, in words.
    """

    devices: Sequence[Any]
    compile_lowered: Callable[[Any], Any]

    def compile(self, program: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Compiles a program for the first device; `options` are of `jax.jit`."""
        first = SingleDeviceSharding(self.devices[0])
        if not arguments:
            options["out_shardings"] = first
        return self.compile_lowered(jax.jit(program, **options).lower(*structs(arguments, first)))

    def compile_sharded(self, program: Callable[..., Any], out_specs: Any, *arguments: Any) -> Any:
        """Compiles a program for two devices, by `shard_map`; arguments are split by their first axis."""
        mesh = Mesh(np.array(self.devices[:2]), ("envs",))
        program = jax.shard_map(program, mesh=mesh, in_specs=SHARD, out_specs=out_specs)
        return self.compile_lowered(jax.jit(program).lower(*structs(arguments, NamedSharding(mesh, SHARD))))


def describe(platform: str, name: str = "", **description: Any) -> Sequence[Any]:
    """Returns the described devices."""
    return topologies.get_topology_desc(name, platform=platform, **description).devices


def skip_without(*packages: str) -> pytest.MarkDecorator:
    """Skips tests if none of the packages with the device's compiler is installed."""
    there = any(importlib.util.find_spec(package) for package in packages)
    return pytest.mark.skipif(not there, reason=f"{' or '.join(packages)}: not installed")


def structs(tree: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def arguments(envs: jaxvec.VectorEnv) -> tuple[Any, Any]:
    """Returns a handle to all envs, and an action."""
    return jaxvec.reset(envs)[0], jnp.zeros(envs.num_envs, int)


def without_fusions(hlo: str) -> str:
    """Returns the program's text without fused loops, in which a copy can be an intermediate value."""
    return re.sub(r"^%fused_.*?^}$", "", hlo, flags=re.DOTALL | re.MULTILINE)


def copies(hlo: str) -> list[str]:
    """Returns the types, without layouts, of the arrays that the program copies as a whole."""
    return [re.sub(r"\{.*?\}$", "", each) for each in re.findall(r"= (\S+) copy(?:-start)?\(", hlo)]
