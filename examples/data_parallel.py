"""Data-parallel actor-critic: several processes, each with its own envs, train one policy.

This command starts two processes on this machine, which connect through `jax.distributed` and compute on
the CPU:

    python examples/data_parallel.py

To use several machines, start each process by hand, with equal options except `--process-id`, which starts
at 0:

    python examples/data_parallel.py --coordinator HOST:PORT --num-processes 2 --process-id 0

With `--backend ray`, the envs of each process run on the Ray cluster at `RAY_ADDRESS`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import traceback
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from multiprocessing.pool import ThreadPool
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxvec

AXIS = "processes"  # axis of the mesh, with one device per process
SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # equal in all processes; split between them
GAMMA = 0.99  # discount per step
REWARD_SCALE = 0.05  # scales values to a magnitude of about 1
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.005))


def init(key: jax.Array, *sizes: int) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the weights and biases of a network with layers of `sizes`."""
    keys = jax.random.split(key, len(sizes) - 1)
    weights = [jax.random.normal(key, shape) for key, shape in zip(keys, pairwise(sizes), strict=True)]
    return [(weight / len(weight) ** 0.5, jnp.zeros(weight.shape[1])) for weight in weights]


def network(params: Any, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maps `[..., obs_size]` to the policy's logits `[..., num_actions]` and values `[...]`."""
    for weight, bias in params[:-1]:
        obs = jnp.tanh(obs @ weight + bias)
    outputs = obs @ params[-1][0] + params[-1][1]
    return outputs[..., 1:], outputs[..., 0]


def loss(params: Any, obs: jax.Array, action: jax.Array, target: jax.Array) -> jax.Array:
    """Returns the loss, `[]`, of `[num_steps, num_envs]` local steps, averaged over the processes."""
    logits, value = network(params, obs)
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]
    gain = log_prob * jax.lax.stop_gradient(target - value)
    return jax.lax.pmean(jnp.mean(0.5 * jnp.square(target - value) - gain), AXIS)


def update(num_steps: int, params: Any, opt_state: Any, own: Any, key: jax.Array) -> tuple[Any, ...]:
    """Collects steps and learns from them, once. All processes run this program, each with its own envs.

    `own` contains the handle, the observations `[num_envs, obs_size]` and the returns of the last episodes
    `[num_envs]`. Returns the arguments of the next update, and the mean return over all processes, `[]`.
    """

    def play(own: Any, key: jax.Array) -> Any:
        handle, obs, returns = own
        action = jax.random.categorical(key, network(params, obs)[0])
        handle, (next_obs, reward, terminated, truncated, info) = jaxvec.step(handle, action)
        # Bootstrap unless the episode terminated: a truncated episode could have continued.
        future = jnp.where(truncated, network(params, info["final_obs"])[1], 0)
        done = terminated | truncated
        returns = jnp.where(done, info["episode_return"], returns)
        return (handle, next_obs, returns), (obs, action, REWARD_SCALE * reward + GAMMA * future, done)

    def discount(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        target = now[0] + GAMMA * jnp.where(now[1], 0, later)
        return target, target

    keys = jax.random.split(jax.random.fold_in(key, jax.lax.axis_index(AXIS)), num_steps)
    own, (obs, action, reward, done) = jax.lax.scan(play, own, keys)
    _, target = jax.lax.scan(discount, network(params, own[1])[1], (reward, done), reverse=True)
    # The loss is a mean over the processes, so every process gets the mean of all gradients.
    gradient = jax.grad(loss)(params, obs, action, target)
    change, opt_state = OPTIMIZER.update(gradient, opt_state, params)
    return optax.apply_updates(params, change), opt_state, own, jax.lax.pmean(jnp.nanmean(own[2]), AXIS)


def train(args: argparse.Namespace) -> None:
    """Trains as one of the processes, and prints the result."""
    process, mesh = jax.process_index(), Mesh(jax.devices(), AXIS)
    specs = SAME, SAME, SPLIT, SAME
    program = jax.jit(
        jax.shard_map(partial(update, args.num_steps), mesh=mesh, in_specs=specs, out_specs=specs)
    )
    with jaxvec.make(args.env, args.num_envs, backend=args.backend, num_workers=args.num_workers) as envs:
        handle, timestep = jaxvec.reset(envs, seed=args.seed + process * args.num_envs)
        own = handle, timestep.obs, jnp.full_like(timestep.info["episode_return"], jnp.nan)
        # Joins the parts of all processes along the env axis, into global arrays and one global handle.
        own = jax.tree.map(partial(jax.make_array_from_process_local_data, NamedSharding(mesh, SPLIT)), own)
        key, num_actions = jax.random.key(args.seed), envs.single_action_space.n  # pyright: ignore[reportAttributeAccessIssue]
        params = init(key, timestep.obs.shape[1], 64, 64, 1 + int(num_actions))
        opt_state = OPTIMIZER.init(params)
        for i in range(args.num_updates):
            params, opt_state, own, mean = program(params, opt_state, own, jax.random.fold_in(key, i))
            if process == 0:
                print(f"update {i + 1}: mean return {float(mean):.1f}", flush=True)
    checksum = zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)))
    here = np.nanmean(own[2].addressable_data(0))
    print(f"process {process}: mean return {here:.1f} here, parameters {checksum:08x}", flush=True)


def free_address() -> str:
    """Returns an unused HOST:PORT of this machine."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def launch(argv: Sequence[str], num_processes: int) -> None:
    """Starts all processes on this machine, and ends them when one fails."""
    command = [sys.executable, __file__, *argv, "--coordinator", free_address()]
    children: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, so that `finally` runs
    with ThreadPool(num_processes) as waiters:
        try:
            for process in range(num_processes):
                children += [subprocess.Popen([*command, "--process-id", str(process)])]
            for code in waiters.imap_unordered(subprocess.Popen.wait, children):
                if code:
                    raise SystemExit(f"a process failed with exit code {code}")
        finally:
            for child in children:
                child.kill()
                child.wait()


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one process of the training, or starts all of them if there is no `--coordinator`."""
    parser = argparse.ArgumentParser(
        prog="python examples/data_parallel.py",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--env",
        default="CartPole-v1",
        help="Gymnasium id of an env with vector observations and Discrete actions",
    )
    parser.add_argument("--num-envs", type=int, default=16, help="number of envs per process")
    parser.add_argument("--num-workers", type=int, help="number of worker processes per process")
    parser.add_argument(
        "--backend", default="process", help="where workers run: process (this machine) or ray"
    )
    parser.add_argument("--num-steps", type=int, default=32, help="steps of each env per update")
    parser.add_argument("--num-updates", type=int, default=300, help="number of gradient steps")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--num-processes", type=int, default=2, help="number of processes")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0; by default, start all processes here")
    parser.add_argument("--process-id", type=int, help="index of this process, starting at 0")
    args = parser.parse_args(argv)
    if args.coordinator is None:
        return launch(sys.argv[1:] if argv is None else argv, args.num_processes)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # JAX has installed a handler that only records a preemption
    try:
        return train(args)
    except BaseException:
        # A normal exit would wait for the other processes, and they wait for this one's gradient.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
