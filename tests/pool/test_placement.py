"""Time steps on devices, for loops in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import probe

import jaxvec
from jaxvec.testing import CountingEnv, NestedEnv

pytestmark = pytest.mark.jax_version

HOST = jax.devices("cpu")


class LargeEnv(CountingEnv):
    """Observes enough for JAX to alias what it can, and to copy in the background what it can't."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Box(0, 255, (300, 300), np.uint8)

    def _observe(self, action):
        return np.full((300, 300), self.steps, np.uint8)


def mesh(devices):
    return NamedSharding(Mesh(np.array(devices), ("envs",)), PartitionSpec("envs"))


def devices_of(timestep):
    return {device for leaf in jax.tree.leaves(timestep) for device in leaf.devices()}


def test_time_steps_are_where_they_should_be(make, backend):
    plain = make(NestedEnv, 4, backend=backend)
    placed = make(NestedEnv, 4, backend=backend, device=HOST[1])
    sharded = make(NestedEnv, 4, backend=backend, device=mesh(HOST[:4]))
    pools = (plain, placed, sharded)
    timesteps = [envs.reset(seed=3) for envs in pools]
    plain.action_space.seed(0)
    for _ in range(9):
        action = plain.action_space.sample()
        for timestep in timesteps[1:]:
            jax.tree.map(np.testing.assert_array_equal, timestep, timesteps[0])
        assert devices_of(timesteps[1]) == {HOST[1]}
        assert devices_of(timesteps[2]) == set(HOST[:4])
        assert all(leaf.sharding.shard_shape(leaf.shape)[0] == 1 for leaf in jax.tree.leaves(timesteps[2]))
        timesteps = [envs.step(action) for envs in pools]


@pytest.mark.parametrize("how", ["device", "sharding"])
def test_later_calls_never_overwrite_them(make, backend, device, how):
    envs = make(LargeEnv, 8, backend=backend, device=device if how == "device" else mesh([device]))
    seen = [envs.reset(seed=0), *(envs.step(jnp.zeros(8, int)) for _ in range(12))]
    envs.send(np.zeros(8, int))
    seen.append(envs.recv(copy=False))
    envs.close()
    for steps, timestep in enumerate(seen):
        assert devices_of(timestep) == {device}
        assert (np.asarray(timestep.obs) == steps).all()


def test_what_is_copied_for_the_cpu_is_copied_once(make, monkeypatch):
    """JAX has the copy itself, and makes no other."""
    envs = make(LargeEnv, 8, device=HOST[0])
    given = []
    put = jax.device_put

    def spy(rows, sharding):
        given.extend(rows)
        return put(rows, sharding)

    monkeypatch.setattr(jax, "device_put", spy)
    timestep = envs.reset()
    (image,) = [array for array in given if array.ndim == 3 and array.dtype == np.uint8][:1]
    assert timestep.obs.unsafe_buffer_pointer() == image.ctypes.data


def test_first_ready_batches(make, device):
    envs = make(CountingEnv, 6, batch_size=2, device=device)
    timestep = envs.reset(seed=0)
    for _ in range(20):
        env_id = np.asarray(timestep.info["env_id"])
        assert timestep.obs.devices() == {device}
        envs.send(10 + env_id, env_id)
        timestep = envs.recv()
        stepped = np.asarray(timestep.obs[:, 1]) > 0
        np.testing.assert_array_equal(timestep.obs[stepped, 3], 10 + timestep.info["env_id"][stepped])


def test_programs_are_not_concerned(make):
    envs = make(CountingEnv, 2, device=HOST[1])
    handle, timestep = jaxvec.reset(envs)
    assert devices_of(timestep) == {HOST[0]}
    _, timestep = jax.jit(jaxvec.step)(handle, jnp.zeros(2, int))
    assert devices_of(timestep) == {HOST[0]}


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("gpu", TypeError, "device must be one of jax.devices"),
        (PartitionSpec("envs"), TypeError, "or a jax.sharding.Sharding"),
        (mesh(HOST[:2]), ValueError, "device: cannot shard time steps of 3 envs"),
    ],
)
def test_what_can_not_be_is_refused(make, where, error, message):
    with pytest.raises(error, match=message):
        make(CountingEnv, 3, device=where)


def test_host_calls_alone_wait_for_the_gpu_copies_of_programs(make, monkeypatch):
    envs = make(CountingEnv, 2, num_workers=1, transport="io_callback", dispatch="portable")
    handle, _ = jaxvec.reset(envs)
    waits = []
    monkeypatch.setattr(probe.engine(envs), "wait_for_copies", lambda: waits.append("wait"))
    # A program with the latest handle starts after them.
    jax.block_until_ready(jax.jit(jaxvec.step)(handle, jnp.zeros(2, int)))
    assert waits == []
    envs.get_attr("steps")
    assert waits == ["wait"]
