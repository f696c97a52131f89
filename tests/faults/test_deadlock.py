"""A callback must not deadlock while other threads dispatch JAX work and large arrays pass through."""

import os
import textwrap
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from support import disasters
from support.probe import _ffi, _io_callback
from support.scripts import run_python

import jaxvec

pytestmark = pytest.mark.jax_version

# What hangs jax 0.7 to 0.10 if a callback reads an input of 100 KiB or more: its value is not ready at
# dispatch, so it is copied on a thread pool that other threads' programs keep busy.
SCRIPT = """
    import sys, threading
    import jax, jax.numpy as jnp
    import jaxvec
    from support.disasters import PATIENCE
    from test_deadlock import WIDTH, Wide

    jaxvec.config.transport = sys.argv[1].split()[-1]
    if sys.argv[1] == "jax's io_callback":
        from jaxvec.callbacks import _io_callback
        _io_callback._emit = None
    envs = jaxvec.make(Wide, 4, timeouts=jaxvec.Timeouts(*[PATIENCE] * 3))
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
    action = jnp.zeros((4, WIDTH))
    for i in range(30):
        handle, timestep = step(handle, late(action, matrix))
        action = timestep.obs
    assert float(action.min()) == float(action.max()) == 30, action
    stop.set()
    for thread in threads:
        thread.join()
    envs.close()
    print("done")
"""


WIDTH = 1 << 16  # float32; for four envs, a megabyte of actions, and of observations


class Wide(gymnasium.Env):
    observation_space = action_space = spaces.Box(-np.inf, np.inf, (WIDTH,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(WIDTH, np.float32), {}

    def step(self, action):
        return action + 1, 0.0, False, False, {}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["io_callback", "jax's io_callback", "ffi"])
@pytest.mark.nightly(but=1)
def test_a_megabyte_passes_while_other_threads_dispatch(transport):
    if transport == "ffi" and _ffi.reason_unavailable():
        pytest.skip(_ffi.reason_unavailable())
    path = os.pathsep.join(map(str, Path(__file__).parents[:2]))
    env = os.environ | {"PYTHONPATH": path}
    done = run_python("-c", textwrap.dedent(SCRIPT), transport, env=env, timeout=500)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_no_input_of_a_callback_is_large_enough_to_hang(monkeypatch):
    """Whether one that is does hang is up to the machine, too: there the test above may show nothing.

    Callbacks of programs for one device take NumPy arrays, which do not hang.
    """
    sizes = []

    def io_callback(answer, results, *inputs, ordered):
        sizes.extend(each.size * each.dtype.itemsize for each in inputs)
        return [jnp.zeros(each.shape, each.dtype) for each in results]

    monkeypatch.setattr(_io_callback, "io_callback", io_callback)
    monkeypatch.setattr(_io_callback, "_emit", None)
    with disasters.make(Wide, 4, transport="io_callback") as envs:
        handle, _ = jaxvec.reset(envs)
        sizes.clear()
        jax.jit(jaxvec.step).lower(handle, jnp.zeros((4, WIDTH)))
    assert sum(sizes) >= 4 * WIDTH * 4
    assert max(sizes) < 100 * 1024
