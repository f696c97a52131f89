"""Programs that end otherwise with another library than with our API of it.

The tables "Programs that differ" on the porting pages are written from runs of `PROGRAMS`:
`python tests/compat/test_compat_differences.py` prints them. A row is left out once both do the same.
"""

import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxvec.compat import envpool, gymnax

PAGES = Path(__file__).parents[2] / "docs" / "porting"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the originals

# --- gymnax: functions of `make`, which returns an env and its parameters ----------------------------------

KEY = jax.random.key(0)
NAMES = ["step_env", "reset_env", "get_obs", "is_terminal", "discount", "state_space", "num_actions", "name"]


def start(make):
    env, params = make("CartPole-v1")
    _, state = env.reset(KEY, params)
    return env, params, state


def step_a_state_twice(make):
    env, params, state = start(make)
    env.step(KEY, state, 0, params)
    return env.step(KEY, state, 0, params)[0].shape


def step_a_state_from_before_a_reset(make):
    env, params, state = start(make)
    env.reset(KEY, params)
    return env.step(KEY, state, 0, params)[0].shape


def step_half_of_the_states(make):
    env, params = make("CartPole-v1")
    _, states = jax.vmap(env.reset, (0, None))(jax.random.split(KEY, 4), params)
    half = jax.tree.map(lambda x: x[:2], states)
    return jax.vmap(env.step, (None, 0, None, None))(KEY, half, 0, params)[0].shape


def step_in_one_branch(make):
    env, params = make("CartPole-v1")
    _, states = jax.vmap(env.reset, (0, None))(jax.random.split(KEY, 2), params)

    def branch(state, flag):
        return jax.lax.cond(flag, lambda: env.step(KEY, state, 0, params)[0], lambda: jnp.zeros(4))

    return jax.vmap(branch)(states, jnp.arange(2) > 0).shape


def repeat_an_episode(make):
    ends = []
    for _ in range(2):
        env, params, state = start(make)
        for action in (0, 1, 1):
            obs, state, *_ = env.step(KEY, state, action, params)
        ends.append(obs)
    return bool((ends[0] == ends[1]).all())


def change_the_time_limit(make):
    env, params, state = start(make)
    params = params.replace(max_steps_in_episode=1)
    return any(map(bool, env.step(KEY, state, 0, params)[3:-1]))


def step_with_a_wrong_action(make):
    env, params, state = start(make)
    return env.step(KEY, state, 7, params)[0].shape


def count_the_results_of_a_step(make):
    env, params, state = start(make)
    return len(env.step(KEY, state, 0, params))


def read_the_keys_of_info(make):
    env, params, state = start(make)
    return sorted(env.step(KEY, state, 0, params)[-1])


def look_for_methods(make):
    env, _, _ = start(make)
    return [name for name in NAMES if hasattr(env, name)]


GYMNAX = {
    "steps one state twice": step_a_state_twice,
    "resets, and then steps an older state": step_a_state_from_before_a_reset,
    "steps the first two of four states": step_half_of_the_states,
    "steps in a branch of `cond`, under `vmap` with other predicates": step_in_one_branch,
    "plays one episode twice with equal keys, and compares": repeat_an_episode,
    "sets `max_steps_in_episode=1` by `params.replace`": change_the_time_limit,
    "passes the action 7 to CartPole": step_with_a_wrong_action,
    "counts the results of `step`": count_the_results_of_a_step,
    "reads the keys of `info`": read_the_keys_of_info,
    "looks for methods": look_for_methods,
}

# --- EnvPool: functions of `make`, which returns two envs ---------------------------------------------------

ACTIONS = np.zeros(2, np.int32)


def after_a_reset(call):
    def program(make):
        envs = make("CartPole-v1", env_type="gymnasium", num_envs=2)
        envs.reset()
        return call(envs)

    return program


def step_before_a_reset(make):
    return make("CartPole-v1", env_type="gymnasium", num_envs=2).step(ACTIONS)[0].shape


def step_a_handle_twice(envs):
    handle, _, _, step = envs.xla()
    step(handle, jnp.zeros(2, jnp.int32))
    return step(handle, jnp.zeros(2, jnp.int32))[1][0].shape


def read_the_shape_of_a_handle(envs):
    return envs.xla()[0].shape


def play_past_an_end(envs):
    steps = [envs.step(np.ones(2, np.int32)) for _ in range(40)]
    end = next(i for i, step in enumerate(steps) if step[2][0])
    return steps[end + 1][4]["elapsed_step"][0].item(), steps[end + 1][1][0].item()


ENVPOOL = {
    "steps before the first `reset`": step_before_a_reset,
    "steps with actions in int64": after_a_reset(lambda envs: envs.step(np.zeros(2, np.int64))[0].shape),
    "steps with actions 1.7": after_a_reset(lambda envs: envs.step(np.full(2, 1.7))[0].shape),
    "steps with a list": after_a_reset(lambda envs: envs.step([0, 0])[0].shape),
    "passes the action 7 to CartPole": after_a_reset(lambda envs: envs.step(ACTIONS + 7)[0].shape),
    "steps env 1 only": after_a_reset(lambda envs: envs.step(ACTIONS[:1], np.array([1]))[0].shape),
    "resets env 1 only": after_a_reset(lambda envs: envs.reset(np.array([1]))[0].shape),
    "passes `seed` to `reset`": after_a_reset(lambda envs: envs.reset(seed=3)[0].shape),
    "steps one handle of `xla()` twice": after_a_reset(step_a_handle_twice),
    "reads the shape of a handle": after_a_reset(read_the_shape_of_a_handle),
    "reads `elapsed_step` and the reward after an end": after_a_reset(play_past_an_end),
    "reads the dtypes of a step": after_a_reset(
        lambda envs: [str(part.dtype) for part in envs.step(ACTIONS)[:4]]
    ),
    "reads the keys of `info`": after_a_reset(lambda envs: sorted(envs.step(ACTIONS)[4])),
}

# --- Brax: functions of `make`, which returns an env --------------------------------------------------------


def functions_of(env):
    """Returns `reset()` to a state, and `step(state)` to an observation, the next state and an info."""

    def step(state):
        state = env.step(state, jnp.zeros(1))
        return state.obs, state, state.info

    return lambda: env.reset(KEY), step


def twice(make):
    reset, step = functions_of(make())
    state = reset()
    step(state)
    return step(state)[0].shape


def before_a_reset(make):
    reset, step = functions_of(make())
    state = reset()
    reset()
    return step(state)[0].shape


def in_one_branch(make):
    reset, step = functions_of(make())
    states = jax.vmap(lambda _: reset())(jnp.arange(2))

    def branch(state, flag):
        return jax.lax.cond(flag, lambda: step(state)[0], lambda: jnp.zeros_like(step(state)[0]))

    return jax.vmap(branch)(states, jnp.arange(2) > 0).shape


def keys_of_info(make):
    reset, step = functions_of(make())
    return sorted(step(reset())[2])


BRAX = {
    "steps one state twice": twice,
    "resets, and then steps an older state": before_a_reset,
    "steps in a branch of `cond`, under `vmap` with other predicates": in_one_branch,
    "reads the keys of `info`": keys_of_info,
    "tests `state.pipeline_state is None`": lambda make: make().reset(KEY).pipeline_state is None,
    "looks for `sys`, `dt` and `render`": lambda make: [
        name for name in ("sys", "dt", "render") if hasattr(type(make()), name)
    ],
}

# --- The tables --------------------------------------------------------------------------------------------


def brax_env():
    return import_module("brax.envs").get_environment("fast")


def our_brax_env(**options):
    return import_module("jaxvec.compat.brax").make("Pendulum-v1", **options)


# By library: the programs, the library's `make`, ours, and the page.
PROGRAMS = {
    "gymnax": (GYMNAX, lambda *args: import_module("gymnax").make(*args), gymnax.make, "gymnax"),
    "envpool": (
        ENVPOOL,
        lambda *args, **kwargs: import_module("envpool").make(*args, **kwargs),
        envpool.make,
        "envpool",
    ),
    "brax": (BRAX, brax_env, our_brax_env, "gymnax"),
}


def outcome(program, make):
    """Returns the result of a program as the tables show it."""
    made = []

    def remember(*args, **kwargs):
        found = make(*args, **kwargs)
        made.append(found[0] if isinstance(found, tuple) else found)
        return found

    try:
        return f"`{program(remember)}`"
    except Exception:
        return "error"
    finally:
        for env in made:
            if hasattr(env, "close"):
                env.close()


def differing(library):
    """Returns the lines of a porting page's table, from runs of both libraries."""
    pytest.importorskip(library, exc_type=ImportError)
    programs, their_make, make, _ = PROGRAMS[library]
    lines = [f"| a program that | {library} | jaxvec |", "| --- | --- | --- |"]
    for name, program in programs.items():
        cells = [outcome(program, their_make), outcome(program, partial(make, backend="serial"))]
        if cells[0] != cells[1]:
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


@pytest.mark.parametrize("library", PROGRAMS)
def test_porting_page_has_the_table_of_differing_programs(library, no_jax_log):
    page = PROGRAMS[library][-1]
    assert "\n".join(differing(library)) in (PAGES / f"{page}.md").read_text()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for library in sys.argv[1:] or PROGRAMS:
        print(*differing(library), sep="\n")
