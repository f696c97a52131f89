"""A callback must not deadlock while other threads dispatch JAX work and large arrays pass through."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import jax
import pytest

from jaxvec.callbacks import _ffi

pytestmark = pytest.mark.jax_version

# What hangs jax 0.7 to 0.10 if a callback reads an input of 100 KiB or more: its value is not ready at
# dispatch, so it is copied on a thread pool that other threads' programs keep busy.
SCRIPT = """
    import sys, threading
    import gymnasium, jax, jax.numpy as jnp, numpy as np
    import jaxvec
    from jaxvec.callbacks import _io

    if sys.argv[1] == "whole":
        _io._PIECE = 1 << 30
    SIZE = 1 << 18  # float32: a megabyte of actions, and of observations

    class Wide(gymnasium.Env):
        observation_space = action_space = gymnasium.spaces.Box(-np.inf, np.inf, (SIZE // 4,), np.float32)
        def reset(self, *, seed=None, options=None):
            return np.zeros(SIZE // 4, np.float32), {}
        def step(self, action):
            return action + 1, 0.0, False, False, {}

    envs = jaxvec.make(Wide, 4, transport="ffi" if sys.argv[1] == "ffi" else "io_callback")
    handle, timestep = jaxvec.reset(envs)
    matrix = jnp.ones((300, 300))
    busy = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y / 300, x))
    stop = threading.Event()

    def dispatch():
        while not stop.is_set():
            x = matrix
            for _ in range(20):
                x = busy(x)
            x.block_until_ready()

    threads = [threading.Thread(target=dispatch, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    step = jax.jit(jaxvec.step)
    late = jax.jit(lambda x, y: x + 0 * (y @ y).sum())
    action = jnp.zeros((4, SIZE // 4))
    steps = 300 if sys.argv[1] == "whole" else 30  # that must hang, sooner or later
    for i in range(steps):
        handle, timestep = step(handle, late(action, matrix))
        action = timestep.obs
    assert float(action.min()) == float(action.max()) == steps, action
    stop.set()
    for thread in threads:
        thread.join()
    envs.close()
    print("done")
"""


def run(how, timeout):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), how],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.parametrize("how", ["pieces", "ffi"])
def test_a_megabyte_passes_while_other_threads_dispatch(how):
    if how == "ffi" and _ffi.reason_unavailable():
        pytest.skip(_ffi.reason_unavailable())
    done = run(how, timeout=200)
    assert (done.stdout, done.stderr) == ("done\n", "")


@pytest.mark.skipif(jax.version.__version_info__ >= (0, 11), reason="jax 0.11 mended this deadlock")
def test_the_recipe_does_deadlock_if_the_input_goes_in_whole():
    """Else the test above would show nothing."""
    with pytest.raises(subprocess.TimeoutExpired):
        run("whole", timeout=15)
