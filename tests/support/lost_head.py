"""A program of test_ray.py whose cluster loses its head node during a compiled loop; Ray may end it."""

from __future__ import annotations

import os
import threading

import jax
import jax.numpy as jnp
import ray
from ray.cluster_utils import Cluster
from support import probe
from support.disasters import wait_until

import jaxvec
from jaxvec.testing import CountingEnv

cluster = Cluster()
cluster.add_node(num_cpus=0, object_store_memory=100 * 2**20)
cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)
ray.init(address=cluster.address, log_to_driver=False)
envs = jaxvec.make(CountingEnv, 4, num_workers=2, backend="ray")
handle, _ = jaxvec.reset(envs)
completed = probe.array(envs, "completed")


def behead() -> None:
    wait_until(lambda: (completed > 50).all())
    cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)


threading.Thread(target=behead, daemon=True).start()
loop = jax.jit(
    lambda handle: jax.lax.fori_loop(0, 10**9, lambda _, h: jaxvec.step(h, jnp.zeros(4, int))[0], handle)
)
try:
    with envs:
        jax.block_until_ready(loop(handle))
except jaxvec.WorkerDiedError as error:
    print(f"WorkerDiedError: {error}")
envs.close()
print("closed", flush=True)
for node in cluster.list_all_nodes():
    node.kill_all_processes(check_alive=False, allow_graceful=False)
os._exit(0)  # Ray would wait for the head
