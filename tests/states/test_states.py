"""Saved states against a model that deep-copies Gymnasium's envs by itself, and foretells every field."""

import ast
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.disasters import RaisingEnv
from support.probe import _ffi, _native, pool_of
from support.scripts import run_python
from support.state_game import (
    CAPACITY,
    NUM_ENVS,
    Game,
    HostFace,
    Model,
    ProgramFace,
    cart_pole,
    save_in_jit,
    walk,
)

import jaxvec
from jaxvec.testing import CountingEnv

_MODES = cycle(["SAME_STEP", "NEXT_STEP", "EPISODIC", "DISABLED"])
_ENVS = cycle([walk, walk, walk, walk, cart_pole])
_GAMES = [
    (dispatch, face, next(_MODES), next(_ENVS))
    for dispatch in ("native", "portable", "serial")
    for face in ("host", "ffi", "io_callback")
] + [("serial", "host", "SAME_STEP", cart_pole)]


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(
    ("dispatch", "face", "mode", "env_fn"), _GAMES, ids=lambda value: getattr(value, "__name__", value)
)
def test_all_is_as_the_model_foretells(make, no_jax_log, dispatch, face, mode, env_fn):
    for reason in (
        _native.reason_unavailable() if dispatch == "native" else None,
        _ffi.reason_unavailable() if face == "ffi" else None,
    ):
        if reason:
            pytest.skip(reason)
    options = {"backend": "serial"} if dispatch == "serial" else {"dispatch": dispatch, "num_workers": 2}
    options |= {"autoreset_mode": mode}
    envs = make(
        env_fn,
        NUM_ENVS,
        states=CAPACITY,
        info={"luck": np.float32},
        transport="auto" if face == "host" else face,
        **options,
    )
    models = [Model(env_fn(), mode, env_id) for env_id in range(NUM_ENVS)]
    game = Game((HostFace if face == "host" else ProgramFace)(envs), models, np.random.default_rng(0))
    game.play(120)
    assert game.count > 3 * CAPACITY
    total = envs.stats().total
    assert (total.steps, total.simulated) == (game.steps, game.simulated)
    if face == "host":
        assert envs.infos() == tuple(model.raw for model in models)


# --- what it does to programs -----------------------------------------------------------------


ACTIONS = np.random.default_rng(1).integers(2, size=(30, 4))


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def counting(env_id):
    return CountingEnv(4)


@pytest.fixture
def pool(make, transport, no_jax_log):
    """Yields four CartPoles, a handle that has moved a bit, and their states."""
    envs = make("CartPole-v1", 4, states=400, num_workers=2, transport=transport)
    handle, _ = jaxvec.reset(envs, seed=0)
    handle, _ = jaxvec.step(handle, ACTIONS[0])
    return envs, *save_in_jit(handle)


def test_scans_of_simulate_are_those_of_step(pool):
    envs, handle, state = pool
    handle, stepped = jax.jit(lambda handle: jax.lax.scan(jaxvec.step, handle, ACTIONS))(handle)
    simulate = jax.jit(
        lambda state: jax.lax.scan(lambda state, action: jaxvec.simulate(envs, state, action), state, ACTIONS)
    )
    equal(simulate(state)[1], stepped)
    equal(simulate(state)[1], stepped)  # which has changed nothing


def test_under_vmap_each_instance_has_states_of_its_own(pool):
    envs, handle, state = pool
    split, join = (jax.tree_util.Partial(jax.tree.map, f) for f in (_halves, _joined))

    @jax.jit
    def program(handle, state, actions):
        simulated = jax.vmap(lambda state, action: jaxvec.simulate(envs, state, action))(state, actions)
        handle, timestep = jax.vmap(jaxvec.step)(handle, actions)
        handle, saved = jax.vmap(jaxvec.save)(handle)
        handle, restored = jax.vmap(jaxvec.restore)(handle, saved)
        return handle, simulated, timestep, restored

    handle, simulated, timestep, restored = program(split(handle), split(state), ACTIONS[0].reshape(2, 2))
    equal(simulated[1], timestep)
    equal(restored, timestep)
    equal(join(envs.save().ids.reshape(2, 2, 3))[:, 0], [pool_of(envs).id] * 4)


def _halves(x):
    return x.reshape(2, 2, *x.shape[1:])


def _joined(x):
    return x.reshape(4, *x.shape[2:])


def test_vmapped_loops_may_end_at_different_times(pool):
    """That would step envs too often, but changes nothing where copies are stepped."""
    envs, _, state = pool

    def play(state):
        """Pushes to the left until the pole falls."""

        def push(carry):
            state, steps, _ = carry
            state, timestep = jaxvec.simulate(envs, state, jnp.zeros(1, int))
            over = (timestep.terminated | timestep.truncated)[0]
            return state, steps + 1, over

        return jax.lax.while_loop(lambda carry: ~carry[2], push, (state, 0, jnp.array(False)))[1]

    together = jax.jit(jax.vmap(play))(state[:, None])
    alone = [jax.jit(play)(state[i : i + 1]) for i in range(4)]
    np.testing.assert_array_equal(together, alone)
    assert len(set(np.asarray(together).tolist())) > 1


def test_calls_whose_results_nobody_reads_are_dropped(pool):
    envs, _, state = pool
    before = envs.stats().states
    jax.jit(lambda state: (jaxvec.simulate(envs, state, ACTIONS[0]), 1)[1])(state)
    assert envs.stats().states == before


def test_any_number_of_copies_at_once(pool):
    envs, _, state = pool
    many = jaxvec.EnvState(jnp.tile(state.ids, (70, 1))[:150])  # of two workers, more than they do at once
    actions = np.arange(150) % 2
    _, timestep = jax.jit(lambda state: jaxvec.simulate(envs, state, actions))(many)
    _, expected = envs.simulate(state[np.arange(150) % 4], actions)
    equal(timestep, expected)
    np.testing.assert_array_equal(timestep.info["env_id"], np.arange(150) % 4)


# --- where states may go ----------------------------------------------------------------------


def test_a_state_goes_on_in_another_pool(make):
    pools = [make("CartPole-v1", 4, states=20, num_workers=n) for n in (2, 1)]
    for envs in pools:
        envs.reset(seed=0)
    pools[0].step(ACTIONS[0])
    state = pools[0].save()
    with pytest.raises(jaxvec.StaleStateError, match="state 0 is of pool .* pack_states and unpack_states"):
        pools[1].restore(state)
    moved = pools[1].unpack_states(pools[0].pack_states(state))
    mine = pools[1].save()
    expected = [pools[0].simulate(state, ACTIONS[1])[1].obs, pools[1].simulate(mine, ACTIONS[1])[1].obs]
    timestep = pools[1].restore(
        jaxvec.EnvState(np.stack([moved.ids[0], mine.ids[1], moved.ids[2], mine.ids[0]]))
    )
    pushed = pools[1].step(ACTIONS[1][[0, 1, 2, 0]])
    np.testing.assert_array_equal(
        pushed.obs, np.stack([expected[0][0], expected[1][1], expected[0][2], expected[1][0]])
    )
    np.testing.assert_array_equal(timestep.info["env_id"], range(4))


ELSEWHERE = """
import jaxvec
with jaxvec.make("CartPole-v1", 2, states=10, backend="serial") as envs:
    envs.reset(seed=0)
    print(envs.save().ids.tolist())
"""


def test_a_state_of_another_process_is_refused(make):
    printed = run_python("-c", ELSEWHERE, check=True).stdout
    foreign = np.array(ast.literal_eval(printed), np.uint32)
    envs = make("CartPole-v1", 2, states=10, backend="serial")
    envs.reset(seed=1)
    foreign[:, 0] = envs.save().ids[:, 0]  # the first pool of each process has the same id
    with pytest.raises(jaxvec.StaleStateError, match="state 0 was saved in another process"):
        envs.restore(jaxvec.EnvState(foreign))
    with pytest.raises(jaxvec.StaleStateError, match="state 0 was saved in another process"):
        envs.simulate(jaxvec.EnvState(foreign), [0, 0])


def test_an_episode_that_is_over_is_so_in_another_pool(make):
    pools = [
        make(CountingEnv, 2, episode_length=1, autoreset_mode="DISABLED", states=10, backend="serial")
        for _ in range(2)
    ]
    for envs in pools:
        envs.reset(seed=0)
    running = pools[0].save()
    assert pools[0].step([0, 0]).terminated.all()
    over = pools[0].save()
    running, over = (pools[1].unpack_states(pools[0].pack_states(state)) for state in (running, over))
    pools[1].restore(over)
    with pytest.raises(jaxvec.ResetNeededError):
        pools[1].step([0, 0])
    pools[1].restore(running)
    assert pools[1].step([0, 0]).terminated.all()


def test_states_of_other_pools_and_of_none_are_refused(make):
    envs = make("CartPole-v1", 2, states=10, backend="serial")
    other = make("Acrobot-v1", 2, states=10, backend="serial")
    envs.reset(seed=0)
    other.reset(seed=0)
    with pytest.raises(jaxvec.StaleStateError, match="of pool"):
        other.simulate(envs.save(), [0, 0])
    with pytest.raises(jaxvec.StaleStateError, match="all zeros"):
        envs.restore(jaxvec.EnvState(np.zeros((2, 3), np.uint32)))


def test_handles_go_stale_by_a_restore_and_not_by_a_save(make):
    envs = make("CartPole-v1", 2, states=10, backend="serial")
    handle, _ = jaxvec.reset(envs, seed=0)
    state = envs.save()
    handle, _ = jaxvec.step(handle, [0, 0])
    envs.restore(state)
    with pytest.raises(jaxvec.StaleHandleError, match="by VectorEnv.restore on the host"):
        jaxvec.step(handle, [0, 0])


def test_envs_in_flight_are_refused(make):
    envs = make(counting, 4, states=10, batch_size=2, num_workers=2, recv_order="sent")
    envs.reset_async(seed=0)
    ids = envs.recv().info["env_id"]
    with pytest.raises(jaxvec.PendingEnvError, match="are pending"):
        envs.save()
    state = envs.save(indices=ids)
    envs.send([0, 0], ids)
    with pytest.raises(jaxvec.PendingEnvError, match="are pending"):
        envs.restore(state, indices=ids)
    envs.recv()
    first = envs.recv()
    timestep = envs.restore(state, indices=ids)
    np.testing.assert_array_equal(timestep.obs[:, 1], [0, 0])
    envs.send([0, 0], ids)
    np.testing.assert_array_equal(first.obs[:, 1], [1, 1])


def test_a_mask_chooses_the_envs_to_restore(make):
    envs = make(CountingEnv, 4, states=4, num_workers=2)
    handle, _ = jaxvec.reset(envs, seed=0)
    handle, state = jaxvec.save(handle)
    handle, before = jaxvec.step(handle, [1, 2, 3, 4])
    mask = np.array([False, True, True, False])
    for program in (jaxvec.restore, jax.jit(jaxvec.restore)):
        handle, timestep = program(handle, state, mask=mask)
        assert timestep.obs[:, 1].tolist() == [1, 0, 0, 1]
        np.testing.assert_array_equal(timestep.obs[~mask], before.obs[~mask])
    handle, timestep = program(handle, state, mask=np.zeros(4, bool))
    handle, timestep = jax.vmap(jaxvec.restore)(
        *jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), (handle, state)),
        mask=jnp.array([[True, False], [False, False]]),
    )
    assert timestep.obs[..., 1].tolist() == [[0, 0], [0, 1]]
    for wrong in (np.ones(3, bool), np.ones(4, int)):
        with pytest.raises(ValueError, match="mask must be bool of shape"):
            envs.restore(state, mask=wrong)


def test_faults_are_undone_by_a_mask(make):
    """The recipe of the page about faults: envs that failed go on from their last saved states."""

    policy = jaxvec.Restart(max_restarts=None, rate=None)
    envs = make(RaisingEnv, 4, states=4, num_workers=2, on_fault=policy)
    handle, _ = jaxvec.reset(envs, seed=0)

    @jax.jit
    def program(handle, actions):
        handle, _ = jaxvec.step(handle, actions[0])
        handle, state = jaxvec.save(handle)

        def step(handle, action):
            handle, timestep = jaxvec.step(handle, action)
            handle, restored = jaxvec.restore(handle, state, mask=timestep.info["fault"])
            return handle, (timestep, restored)

        return jax.lax.scan(step, handle, actions[1:])

    actions = np.ones((8, 4), int)
    actions[4, 1] = actions[5, 2] = actions[7, 1] = 7
    _, (timestep, restored) = program(handle, actions)
    np.testing.assert_array_equal(timestep.info["fault"], timestep.truncated)
    assert [each.tolist() for each in timestep.info["fault"].nonzero()] == [[3, 4, 6], [1, 2, 1]]
    assert restored.obs[:, :, 2].tolist() == [
        [2, 2, 2, 2],
        [3, 3, 3, 3],
        [4, 4, 4, 4],
        [5, 1, 5, 5],
        [6, 2, 1, 6],
        [7, 3, 2, 7],
        [8, 1, 3, 8],
    ]
    assert restored.info["episode_length"][:, 1].tolist() == [2, 3, 4, 1, 2, 3, 1]
