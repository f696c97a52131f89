"""PPO with IMPALA's network on images, synchronous and double-buffered: `python -m benchmarks.images`.

The envs' 84 x 84 x 4 bytes go to the device by each way there is. A step of the envs takes as long as the
policy takes for a batch, so a synchronous loop leaves the device idle for half of a rollout, and two halves
that alternate could at best double it. The device's own time is that of the same program without envs; what a
program takes longer, the device idles.
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
    """Waits for `seconds` a step, as for a simulator elsewhere."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        """Waits."""
        if self._seconds:
            time.sleep(self._seconds)
        return super().step(action)


class Impala(nn.Module):
    """The convolutions of IMPALA's deep network, and a head each for policy and value."""

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
    """What is kept of a batch of rows, and of what the policy did with them."""

    obs: jax.Array  # [n, 84, 84, 4] uint8
    reward: jax.Array  # [n] float32, of the action before
    done: jax.Array  # [n] bool
    action: jax.Array  # [n] int32
    log_prob: jax.Array  # [n] float32
    value: jax.Array  # [n] float32


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the actions' log-probabilities, `[n]`."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]


@dataclass(frozen=True)
class Ppo:
    """An update of PPO, whatever it is that advances the envs."""

    num_steps: int
    num_minibatches: int
    halves: int  # how many batches there are of all envs

    @property
    def network(self) -> Impala:
        """Chooses from two actions."""
        return Impala(2)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(1e-4)

    def init(self, obs: jax.Array) -> tuple[Any, Any]:
        """Returns the parameters and the optimizer's state."""
        params = self.network.init(jax.random.key(0), obs[:1])
        return params, self.optimizer.init(params)

    def collect(self, advance: Advance, params: Any, carry: Any, key: jax.Array) -> tuple[Any, Batch]:
        """Returns the carry, a handle and its rows, and `num_steps` batches."""

        def play(carry: Any, key: jax.Array) -> Any:
            handle, timestep = carry
            logits, value = self.network.apply(params, timestep.obs)
            action = jax.random.categorical(key, logits)
            log_prob = log_prob_of(logits, action)
            done = timestep.terminated | timestep.truncated
            batch = Batch(timestep.obs, timestep.reward, done, action, log_prob, value)
            return advance(handle, timestep, action), batch

        return jax.lax.scan(play, carry, jax.random.split(key, self.num_steps))

    def learn(self, params: Any, opt_state: Any, steps: Batch) -> tuple[Any, Any]:
        """Takes one pass over the steps, of which each env's last serves its value alone."""
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


def together(handle: Any, _: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Steps all envs, and waits for them."""
    return jaxvec.step(handle, action)


def in_turn(handle: Any, timestep: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Sends one half away, and takes what the other has done meanwhile."""
    return jaxvec.recv(jaxvec.send(handle, action, timestep.info["env_id"]))


def nowhere(handle: Any, timestep: jaxvec.TimeStep, action: jax.Array) -> Any:
    """Draws the action into the image, as no loop's body may be all the same: what the device does alone."""
    return handle, timestep._replace(obs=timestep.obs.at[:, 0, 0, 0].set(action.astype(jnp.uint8)))


class Program:
    """A training program, its envs and its state."""

    def __init__(self, ppo: Ppo, advance: Advance, handle: Any, timestep: jaxvec.TimeStep) -> None:
        self._carry = handle, timestep
        self._state = ppo.init(timestep.obs)
        self._key = jax.random.key(1)

        @jax.jit
        def rollout(state: Any, carry: Any, key: jax.Array) -> Any:
            carry, steps = ppo.collect(advance, state[0], carry, key)
            return state, carry, jax.tree.map(jnp.sum, steps)  # so that nothing is left out

        @jax.jit
        def update(state: Any, carry: Any, key: jax.Array) -> Any:
            carry, steps = ppo.collect(advance, state[0], carry, key)
            return ppo.learn(*state, steps), carry, ()

        self._programs = {"rollout": rollout, "update": update}

    def __call__(self, what: str) -> float:
        """Returns the seconds of a rollout, or of an update, which is a rollout and learning."""
        start = time.perf_counter()
        program = self._programs[what]
        self._state, self._carry, _ = jax.block_until_ready(program(self._state, self._carry, self._key))
        return time.perf_counter() - start


def turns(programs: Mapping[str, Program], what: str, rounds: int) -> dict[str, float]:
    """Returns each program's seconds, medians of rounds in which they take turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for attempt in range(rounds + 1):  # the first one compiles
        for name, program in programs.items():
            taken = program(what)
            if attempt:
                times[name].append(taken)
    return {name: statistics.median(each) for name, each in times.items()}


def report(options: argparse.Namespace) -> None:
    """Measures, prints as it goes, and writes the file of figures if there is to be one."""
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
    alone = Program(shape(halves=1), nowhere, (), rows)
    seconds = turns({"device": alone}, "rollout", options.rounds)["device"] / options.num_steps
    print(f"the policy takes {seconds * 1e3:.2f} ms for {size} images, and so do the envs for a step")
    figures["policy, ms"] = seconds * 1e3

    # Of the envs that a worker steps in one batch, the first waits for all.
    in_batch = size // workers
    fns = [partial(CameraEnv, 0 if i % in_batch else seconds) for i in range(2 * size)]
    with ExitStack() as stack:
        programs = {"device alone": alone}
        for transport in options.transports:
            stack.enter_context(jaxvec.config.override(transport=transport))
            make = partial(jaxvec.make, num_workers=workers, final_obs=False)
            envs = stack.enter_context(make(fns[:size]))
            programs[f"synchronous, {transport}"] = Program(shape(halves=1), together, *jaxvec.reset(envs))
            envs = stack.enter_context(make(fns, batch_size=size, recv_order="sent"))
            programs[f"two halves, {transport}"] = Program(shape(halves=2), in_turn, *jaxvec.reset(envs))
        for what in ("rollout", "update"):
            times = turns(programs, what, options.rounds)
            print(f"\n{what}: {options.num_steps} batches of {size} images")
            for name, taken in times.items():
                rate, idle = size * options.num_steps / taken, 1 - times["device alone"] / taken
                print(f"  {name:26} {taken * 1e3:9.1f} ms {rate:11,.0f} steps/s, device idle {idle:4.0%}")
                figures.setdefault(what, {})[name] = {"ms": taken * 1e3, "steps/s": rate, "device idle": idle}
            for transport in options.transports:
                ratio = times[f"synchronous, {transport}"] / times[f"two halves, {transport}"]
                print(f"  two halves over synchronous, {transport}: {ratio:.2f}")
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1))


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.images",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--platform", default="cuda", help="cpu tries the script where there is no GPU")
    parser.add_argument("--num-envs", type=int, default=64, help="of a batch")
    parser.add_argument("--num-workers", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=32, help="batches of a rollout")
    parser.add_argument("--num-minibatches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transports", nargs="+", default=["ffi", "io_callback"])
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    if options.num_envs % options.num_workers:
        parser.error("--num-envs must be a multiple of --num-workers")
    if options.num_steps % 2 or options.num_steps < 4:  # two halves learn from all steps but the last
        parser.error("--num-steps must be an even number of at least 4")
    device = jax.devices(options.platform)[0]
    print(f"jax {jax.__version__}, {device.device_kind}")
    with jax.default_device(device):
        report(options)


if __name__ == "__main__":
    main()
