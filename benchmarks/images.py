"""Measures PPO on images, synchronous and double-buffered: `python -m benchmarks.images`.

The policy is IMPALA's deep network. Each transport moves observations of 84 x 84 x 4 bytes to the device. A
step of the envs takes as long as the policy takes for a batch. So a synchronous loop leaves the device idle
for half of a rollout, and two alternating halves can at most double the rate. The idle time is the difference
from the same program without envs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jaxvec
from benchmarks.loads import ImageEnv

Advance = Callable[[Any, jaxvec.TimeStep, jax.Array], tuple[Any, jaxvec.TimeStep]]
GAMMA, DECAY, CLIP = 0.99, 0.95, 0.2


class CameraEnv(ImageEnv):
    """An env that sleeps for `seconds` per step, like one that waits for a remote simulator."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        if self._seconds:
            time.sleep(self._seconds)
        return super().step(action)


class Impala(nn.Module):
    """IMPALA's deep convolutional network with a policy head and a value head."""

    num_actions: int

    @nn.compact
    def __call__(self, image: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps `[n, 84, 84, 4]` uint8 to logits `[n, num_actions]` and values `[n]`."""
        hidden = image.astype(jnp.float32) / 255
        for channels in (16, 32, 32):
            convolve = partial(nn.Conv, channels, (3, 3))
            hidden = nn.max_pool(convolve()(hidden), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                hidden += convolve()(nn.relu(convolve()(nn.relu(hidden))))
        hidden = nn.relu(nn.Dense(256)(nn.relu(hidden.reshape(len(hidden), -1))))
        return nn.Dense(self.num_actions)(hidden), nn.Dense(1)(hidden)[:, 0]


class Batch(NamedTuple):
    """Results of a batch of envs and the decisions of the policy."""

    obs: jax.Array  # [n, 84, 84, 4] uint8
    reward: jax.Array  # [n] float32, of the previous action
    done: jax.Array  # [n] bool
    action: jax.Array  # [n] int32
    log_prob: jax.Array  # [n] float32
    value: jax.Array  # [n] float32


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the log-probabilities `[n]` of actions `[n]` from logits `[n, num_actions]`."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]


@dataclass(frozen=True)
class Ppo:
    """Rollouts and updates of PPO, independent of the function that steps the envs.

    Attributes:
        num_steps: Number of batches of a rollout.
        num_minibatches: Number of minibatches of an update.
        halves: Number of batches that cover all envs, 1 or 2.
    """

    num_steps: int
    num_minibatches: int
    halves: int

    @property
    def network(self) -> Impala:
        return Impala(2)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(1e-4)

    def init(self, obs: jax.Array) -> tuple[Any, Any]:
        """Returns the parameters and the optimizer state for observations like `obs`."""
        params = self.network.init(jax.random.key(0), obs[:1])
        return params, self.optimizer.init(params)

    def collect(self, advance: Advance, params: Any, carry: Any, key: jax.Array) -> tuple[Any, Batch]:
        """Steps the envs `num_steps` times and returns the new carry (handle, time step) and the batches."""

        def play(carry: Any, key: jax.Array) -> Any:
            handle, timestep = carry
            logits, value = self.network.apply(params, timestep.obs)
            action = jax.random.categorical(key, logits)
            log_prob = log_prob_of(logits, action)
            batch = Batch(timestep.obs, timestep.reward, timestep.done, action, log_prob, value)
            return advance(handle, timestep, action), batch

        return jax.lax.scan(play, carry, jax.random.split(key, self.num_steps))

    def learn(self, params: Any, opt_state: Any, steps: Batch) -> tuple[Any, Any]:
        """Updates the parameters with one pass over the steps. The last step of an env only bootstraps."""
        steps = jax.tree.map(lambda x: x.reshape(-1, self.halves * x.shape[1], *x.shape[2:]), steps)

        def add(later: jax.Array, now: Any) -> Any:
            reward, done, value, next_value = now
            surprise = reward + GAMMA * jnp.where(done, 0, next_value) - value
            advantage = surprise + GAMMA * DECAY * jnp.where(done, 0, later)
            return advantage, advantage

        rows = steps.reward[1:], steps.done[1:], steps.value[:-1], steps.value[1:]
        _, advantage = jax.lax.scan(add, jnp.zeros_like(steps.value[0]), rows, reverse=True)
        flat = jax.tree.map(
            lambda x: x.reshape(self.num_minibatches, -1, *x.shape[2:]),
            (jax.tree.map(lambda x: x[:-1], steps), advantage),
        )

        def loss(params: Any, batch: Batch, advantage: jax.Array) -> jax.Array:
            logits, value = self.network.apply(params, batch.obs)
            ratio = jnp.exp(log_prob_of(logits, batch.action) - batch.log_prob)
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
            return jnp.mean(jnp.square(value - batch.value - advantage) / 2 - gain)

        def descend(carry: Any, minibatch: Any) -> Any:
            params, opt_state = carry
            change, opt_state = self.optimizer.update(jax.grad(loss)(params, *minibatch), opt_state, params)
            return (optax.apply_updates(params, change), opt_state), None

        return jax.lax.scan(descend, (params, opt_state), flat)[0]


def step_all(handle: Any, _: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Steps all envs and waits for their results."""
    return jaxvec.step(handle, action)


def step_halves(handle: Any, timestep: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Sends actions to one half of the envs and receives the results of the other half."""
    return jaxvec.recv(jaxvec.send(handle, action, timestep.info["env_id"]))


def mark_image(handle: Any, timestep: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Writes the action into the image, in place of a step of envs.

    The change prevents XLA from moving the policy out of the loop.
    """
    return handle, timestep._replace(obs=timestep.obs.at[:, 0, 0, 0].set(action.astype(jnp.uint8)))


class Program:
    """A training program with its envs, its parameters and its compiled functions."""

    def __init__(self, ppo: Ppo, advance: Advance, handle: Any, timestep: jaxvec.TimeStep) -> None:
        self._carry = handle, timestep
        self._state = ppo.init(timestep.obs)
        self._key = jax.random.key(1)
        self.compiling: dict[str, float] = {}  # seconds by phase

        @jax.jit
        def rollout(state: Any, carry: Any, key: jax.Array) -> Any:
            carry, steps = ppo.collect(advance, state[0], carry, key)
            return state, carry, jax.tree.map(jnp.sum, steps)  # sums, so that XLA removes no step

        @jax.jit
        def update(state: Any, carry: Any, key: jax.Array) -> Any:
            carry, steps = ppo.collect(advance, state[0], carry, key)
            return ppo.learn(*state, steps), carry, ()

        self._programs: dict[str, Any] = {"rollout": rollout, "update": update}

    def compile(self, phase: str) -> None:
        """Compiles the program of a phase, unless that is done, and adds the seconds to `compiling`."""
        if phase not in self.compiling:
            start = time.perf_counter()
            program = self._programs[phase]
            self._programs[phase] = program.lower(self._state, self._carry, self._key).compile()
            self.compiling[phase] = time.perf_counter() - start

    def __call__(self, phase: str) -> float:
        """Runs `"rollout"`, or `"update"` (a rollout and learning), and returns its duration in seconds."""
        start = time.perf_counter()
        program = self._programs[phase]
        self._state, self._carry, _ = jax.block_until_ready(program(self._state, self._carry, self._key))
        return time.perf_counter() - start


def turns(programs: Mapping[str, Program], phase: str, rounds: int) -> dict[str, float]:
    """Returns the duration of a phase of each program in seconds, as medians of alternating rounds."""
    for program in programs.values():
        program.compile(phase)
    times: dict[str, list[float]] = {name: [] for name in programs}
    for attempt in range(rounds + 1):  # the first one warms up
        for name, program in programs.items():
            taken = program(phase)
            if attempt:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def report(options: argparse.Namespace) -> None:
    """Runs all measurements, prints them, and writes them to the file `options.json` if it is set."""
    figures: dict[str, Any] = {}
    size, workers = options.num_envs, options.num_workers
    shape = partial(Ppo, options.num_steps, options.num_minibatches)
    rows = jaxvec.TimeStep(
        jnp.zeros((size, 84, 84, 4), jnp.uint8),
        jnp.zeros(size),
        jnp.zeros(size, bool),
        jnp.zeros(size, bool),
        {"env_id": jnp.arange(size)},
    )
    alone = Program(shape(halves=1), mark_image, (), rows)
    seconds = turns({"device": alone}, "rollout", options.rounds)["device"] / options.num_steps
    print(f"policy for {size} images: {seconds * 1e3:.2f} ms; a step of the envs takes as long")
    figures["policy, ms"] = seconds * 1e3

    # A worker steps the envs of a batch one after another, so only the first one sleeps.
    in_batch = size // workers
    fns = [partial(CameraEnv, 0 if i % in_batch else seconds) for i in range(2 * size)]
    with ExitStack() as stack:
        programs = {"device alone": alone}
        for transport in options.transports:
            stack.enter_context(jaxvec.config.override(transport=transport))
            make = partial(jaxvec.make, num_workers=workers, final_obs=False)
            envs = stack.enter_context(make(fns[:size]))
            programs[f"synchronous, {transport}"] = Program(shape(halves=1), step_all, *jaxvec.reset(envs))
            envs = stack.enter_context(make(fns, batch_size=size, recv_order="sent"))
            programs[f"two halves, {transport}"] = Program(shape(halves=2), step_halves, *jaxvec.reset(envs))
        for phase in ("rollout", "update"):
            times = turns(programs, phase, options.rounds)
            figures["compiling, s"] = {name: program.compiling for name, program in programs.items()}
            seconds = sum(program.compiling[phase] for program in programs.values())
            print(f"\n{phase}: {options.num_steps} batches of {size} images, compiled in {seconds:.1f} s")
            for name, taken in times.items():
                rate, idle = size * options.num_steps / taken, 1 - times["device alone"] / taken
                print(f"  {name:26} {taken * 1e3:9.1f} ms {rate:11,.0f} steps/s, device idle {idle:4.0%}")
                figures.setdefault(phase, {})[name] = {
                    "ms": taken * 1e3,
                    "steps/s": rate,
                    "device idle": idle,
                }
            for transport in options.transports:
                ratio = times[f"synchronous, {transport}"] / times[f"two halves, {transport}"]
                print(f"  two halves over synchronous, {transport}: {ratio:.2f}")
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1))


def main() -> None:
    """Parses the command line and prints the report."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.images",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--platform", default="cuda", help="JAX platform; cpu runs the script without a GPU")
    parser.add_argument("--num-envs", type=int, default=64, help="envs per batch")
    parser.add_argument("--num-workers", type=int, default=8, help="workers per pool")
    parser.add_argument("--num-steps", type=int, default=32, help="batches per rollout")
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each program")
    parser.add_argument("--transports", nargs="+", default=["ffi", "io_callback"])
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    if options.num_envs % options.num_workers:
        parser.error("--num-envs must be a multiple of --num-workers")
    if options.num_steps % 2 or options.num_steps < 4:  # each half needs at least two steps
        parser.error("--num-steps must be an even number of at least 4")
    device = jax.devices(options.platform)[0]
    print(f"jax {jax.__version__}, {device.device_kind}")
    with jax.default_device(device):
        report(options)


if __name__ == "__main__":
    main()
