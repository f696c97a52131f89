r"""Data-parallel actor-critic: several processes, each with its own envs, train one policy.

This command starts two processes on this machine, which connect through `jax.distributed` and compute on
the CPU:

    python -m jaxvec.examples.data_parallel
    python -m jaxvec.examples.data_parallel --resume runs/NAME

To use several machines, start each process by hand, with equal options except `--process-id`, which starts
at 0:

    python -m jaxvec.examples.data_parallel --name NAME --coordinator HOST:PORT --num-processes 2 \
        --process-id 0

The first process writes `runs/NAME`, with metrics and env states of all processes. To resume it, all machines
need that folder. Ctrl-C saves, and ends all processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
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
from jaxvec.logging import Options, TrainingRun, training

AXIS = "processes"  # axis of the mesh, with one device per process
SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)  # equal in all processes; split between them
GAMMA = 0.99  # discount per step
REWARD_SCALE = 0.05  # scales values to a magnitude of about 1
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.005))


@dataclass(frozen=True)
class Config(Options):
    """Trains one policy in several processes, by default on this machine: `--num-processes N`.

    Or start each by hand, with `--coordinator HOST:PORT` of process 0 and `--process-id I`, from 0.
    """

    num_envs: int = 16  # number of envs per process
    num_workers: int | None = None  # number of worker processes per process
    num_steps: int = 32  # steps of each env in an update
    total_steps: int = 307_200  # env steps of all processes, rounded up to whole updates

    @property
    def steps_per_update(self) -> int:
        return jax.process_count() * self.num_envs * self.num_steps


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


def loss(params: Any, obs: jax.Array, action: jax.Array, target: jax.Array) -> Any:
    """Returns the loss of `[num_steps, num_envs]` steps, a mean over the processes, and local metrics."""
    logits, value = network(params, obs)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    error = target - value
    metrics = {
        "policy_loss": -jnp.mean(log_prob * jax.lax.stop_gradient(error)),
        "value_loss": jnp.mean(0.5 * jnp.square(error)),
        "entropy": -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)),
        "explained_variance": 1 - jnp.var(error) / (jnp.var(target) + 1e-8),
    }
    return jax.lax.pmean(metrics["policy_loss"] + metrics["value_loss"], AXIS), metrics


def update(num_steps: int, learner: Any, own: Any, flags: jax.Array, key: jax.Array) -> tuple[Any, ...]:
    """Collects steps and learns from them, once. All processes run this program, each with its own envs.

    `own` contains the handle, the observations `[num_envs, obs_size]` and the returns and lengths of the last
    episodes, both `[num_envs]`. `flags` is `[1, 2]`: whether this process has received a signal, and whether
    it should save. Returns the next `learner` and `own`, and means of metrics and flags over all processes.
    """
    params, opt_state = learner

    def play(own: Any, key: jax.Array) -> Any:
        handle, obs, *ends = own
        action = jax.random.categorical(key, network(params, obs)[0])
        handle, timestep = jaxvec.step(handle, action)
        # Bootstrap unless the episode terminated: a truncated episode could have continued.
        future = timestep.discount * network(params, timestep.last_obs)[1]
        done, info = timestep.done, timestep.info
        latest = info["episode_return"], info["episode_length"].astype(jnp.float32)
        ends = [jnp.where(done, new, old) for new, old in zip(latest, ends, strict=True)]
        return (handle, timestep.obs, *ends), (obs, action, REWARD_SCALE * timestep.reward, done, future)

    def discount(later: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reward, done, future = now  # where the episode ended, `later` belongs to the next one
        target = reward + GAMMA * jnp.where(done, future, later)
        return target, target

    keys = jax.random.split(jax.random.fold_in(key, jax.lax.axis_index(AXIS)), num_steps)
    own, (obs, action, *rewards) = jax.lax.scan(play, own, keys)
    _, target = jax.lax.scan(discount, network(params, own[1])[1], tuple(rewards), reverse=True)
    # The loss is a mean over the processes, so every process gets the mean of all gradients.
    gradient, metrics = jax.grad(loss, has_aux=True)(params, obs, action, jax.lax.stop_gradient(target))
    change, opt_state = OPTIMIZER.update(gradient, opt_state, params)
    means = {
        "episode_return": jnp.nanmean(own[2]),
        "episode_length": jnp.nanmean(own[3]),
        **dict(zip(("stop", "save"), flags[0], strict=True)),
    }
    means |= metrics
    # As one vector, the processes exchange all of them at once.
    mean = jax.lax.pmean(jnp.stack(list(means.values())), AXIS)
    learner = optax.apply_updates(params, change), opt_state
    return learner, own, dict(zip(means, mean, strict=True))


def train(config: Config, run: TrainingRun) -> None:
    """Trains, or continues a run, as one of the processes, and writes its folder."""
    process, mesh = jax.process_index(), Mesh(jax.devices(), AXIS)
    specs = (SAME, SPLIT, SPLIT, SAME), (SAME, SPLIT, SAME)
    sharded = jax.shard_map(
        partial(update, config.num_steps), mesh=mesh, in_specs=specs[0], out_specs=specs[1]
    )
    # Joins the parts of all processes along the env axis, into global arrays and one global handle.
    join = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, SPLIT))
    with run.make(video=0 if process or config.evaluate else config.video) as envs:
        handle, timestep = jaxvec.reset(envs, seed=config.seed + process * config.num_envs)
        none = jnp.full_like(timestep.info["episode_return"], jnp.nan)
        key, num_actions = jax.random.key(config.seed), envs.single_action_space.n  # pyright: ignore[reportAttributeAccessIssue]
        params = init(key, timestep.obs.shape[1], 64, 64, 1 + int(num_actions))
        state = np.int32(0), (params, OPTIMIZER.init(params))
        (number, learner), own = run.load(state, (handle, timestep.obs, none, none), envs)
        if config.evaluate:
            best = jax.jit(lambda _, obs, __: (None, network(learner[0], obs)[0].argmax(-1)))
            run.report(evaluation=run.play(best))
            return
        number, own, stop, program = int(number), jax.tree.map(join, own), False, jax.jit(sharded)
        with run.signals():
            run.show("compiling")
            while number < config.num_updates and not stop:
                # All processes save after the same update: when the first one is due.
                flags = join(np.array([[run.stopped, run.save_due]], np.float32))
                learner, own, means = program(learner, own, flags, jax.random.fold_in(key, number))
                number, stop, due = number + 1, float(means.pop("stop")) > 0, float(means.pop("save")) > 0
                metrics = {name: float(mean) for name, mean in means.items()}
                run.log(number * config.steps_per_update, **metrics)
                stop = stop or (config.stop_at is not None and metrics["episode_return"] >= config.stop_at)
                if stop or due or number == config.num_updates:
                    local = jax.tree.map(lambda leaf: leaf.addressable_data(0), own)
                    run.save((np.int32(number), learner), local, envs, params={"params": learner[0]})
    if stop:
        return
    checksum = zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(learner[0])))
    here = np.nanmean(own[2].addressable_data(0))
    print(f"process {process}: mean return {here:.1f} here, parameters {checksum:08x}", flush=True)


def free_address() -> str:
    """Returns an unused HOST:PORT of this machine."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


def launch(argv: Sequence[str], num_processes: int) -> None:
    """Starts all processes on this machine, and ends them when one fails. Passes signals on to them."""
    command = [sys.executable, __file__, *argv, "--coordinator", free_address()]
    children: list[subprocess.Popen[bytes]] = []
    stopped: list[int] = []

    def stop(number: int, _: Any) -> None:
        stopped.append(number)
        for child in children:
            child.send_signal(signal.SIGTERM)

    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, stop)
    with ThreadPool(num_processes) as waiters:
        try:
            for process in range(num_processes):
                children += [subprocess.Popen([*command, "--process-id", str(process)])]
            for code in waiters.imap_unordered(subprocess.Popen.wait, children):
                if code == 130:  # it has saved, and the others do so as well
                    stopped.append(code)
                elif code:
                    raise SystemExit(130 if stopped else f"a process failed with exit code {code}")
        finally:
            for child in children:
                child.kill()
                child.wait()
    if stopped:
        raise SystemExit(130)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs one process of the training, or starts all of them if there is no `--coordinator`."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--coordinator")
    parser.add_argument("--process-id", type=int, default=0)
    parser.add_argument("--name", default=f"data_parallel_{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--resume")
    args, words = parser.parse_known_args(argv)
    words += ["--resume", args.resume] if args.resume else ["--name", args.name]
    asks = {"-h", "--help", "--evaluate"} & {*words}
    if args.coordinator is None and not asks:
        return launch([*words, "--num-processes", str(args.num_processes)], args.num_processes)
    if not asks:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
        # JAX has installed a handler that only records a preemption.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with training(Config, words, program="data_parallel") as (config, run):
            train(config, run)
    except SystemExit:
        raise
    except BaseException:
        # A normal exit would wait for the other processes, and they wait for this one's gradient.
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main()
