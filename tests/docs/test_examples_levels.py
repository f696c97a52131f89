"""The examples of levels and of several agents: `plr` and `ippo`."""

import sys
from functools import partial

import ippo
import jax
import jax.numpy as jnp
import numpy as np
import plr
import pytest
import shared_ppo

import jaxvec

KEY = jax.random.key(0)


pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.mark.jax_version
def test_plr_trains_all_runs_in_one_program_and_prints_a_table(capsys):
    options = "--num-seeds 2 --num-envs 4 --num-workers 2 --num-updates 4 --num-tests 2 --buffer-size 8"
    result = plr.main([*options.split(), "--num-batches", "1", "--num-minibatches", "2"])
    assert result.held_out.shape == result.walls.shape == (2, 2, 2)
    for shares in result:
        assert ((shares >= 0) & (shares <= 1)).all()
    assert len(set(result.walls.ravel().tolist())) == 8  # each run has levels of its own
    printed = capsys.readouterr().out
    assert f"{4 * 4 * plr.TIME_LIMIT:,} env steps" in printed
    for name in ("uniform", "replay"):
        assert name in printed


def reachable(level):
    """Returns the cells that can be reached from the start, by breadth-first search."""
    free = {divmod(int(cell), plr.SIZE) for cell in np.flatnonzero(np.ravel(level["walls"]) == 0)}
    start, goal = (divmod(int(level[name]), plr.SIZE) for name in ("start", "goal"))
    free |= {start, goal}
    seen = todo = {start}
    while todo:
        todo = {(y + down, x + right) for y, x in todo for down, right in plr.MOVES} & free - seen
        seen |= todo
    return free, seen, goal


def test_plrs_mazes_are_perfect_and_levels_are_in_their_space():
    mazes = plr.perfect_mazes(20)
    for number in range(20):
        level = {name: leaf[number] for name, leaf in mazes.items()}
        free, seen, _ = reachable(level)
        assert free == seen  # each cell can be reached
        pairs = sum((y + 1, x) in free for y, x in free) + sum((y, x + 1) in free for y, x in free)
        assert pairs == len(free) - 1  # by one way, as in a tree
        assert level["start"] != level["goal"]
    levels = plr.random_levels(KEY, 50)
    mutated = plr.mutate(KEY, levels)
    for number in range(50):
        for one in (levels, mutated):
            assert plr.LEVEL.contains(
                {
                    "walls": np.asarray(one["walls"][number]),
                    "start": np.int64(one["start"][number]),
                    "goal": np.int64(one["goal"][number]),
                }
            )
    flipped = (levels["walls"] != mutated["walls"]).sum((1, 2))
    assert 3 < flipped.mean() < 7


def test_plrs_maze_can_be_solved_exactly_where_a_way_exists():
    """Follows shortest ways, so that walls, starts and goals must be where the level has them."""
    levels = plr.random_levels(KEY, 60)
    env, solved = plr.Maze(), 0
    for number in range(60):
        level = {name: np.asarray(leaf[number]) for name, leaf in levels.items()}
        free, seen, goal = reachable(level)
        obs, _ = env.reset(options=level)
        assert plr.Maze.observation_space.contains(obs)
        if goal not in seen:
            continue
        distance, todo = {goal: 0}, [goal]
        for y, x in todo:
            for at in {(y + down, x + right) for down, right in plr.MOVES} & free - {*distance}:
                distance[at] = distance[y, x] + 1
                todo.append(at)
        place, reward, steps = divmod(int(level["start"]), plr.SIZE), 0, 0
        while place != goal:
            ways = [(place[0] + down, place[1] + right) for down, right in plr.MOVES]
            action = min(range(4), key=lambda one, ways=ways: distance.get(ways[one], 999))
            place, steps = ways[action], steps + 1
            _, reward, terminated, truncated, _ = env.step(action)
            assert (terminated, truncated) == (place == goal, steps == plr.TIME_LIMIT)
        assert reward == pytest.approx(1 - 0.9 * steps / plr.TIME_LIMIT)
        solved += 1
    assert 20 < solved <= 60


def test_plrs_buffer_keeps_the_best_and_updates_what_was_replayed():
    def buffer(scores, now):
        scores = jnp.float32(scores)
        return plr.Buffer({"goal": scores.astype(int)}, scores, scores, jnp.full(scores.shape, now))

    kept = buffer([5, 3, 1], 0)
    seen = buffer([2, 4, 0.5], 7)
    kept = kept.add(seen._replace(level={"goal": jnp.array([5, 4, 0])}), jnp.array([0, 3, 3]))
    assert kept.score.tolist() == [4, 3, 2]
    assert kept.level["goal"].tolist() == [4, 3, 5]  # the replayed level 5 has its new score, 2
    assert kept.scored_at.tolist() == [7, 0, 7]
    config = plr.Config(num_envs=2, temperature=1.0, staleness=0.0)
    drawn = jax.vmap(lambda key: kept.sample(config, key, jnp.int32(7)))(jax.random.split(KEY, 4000))
    assert (drawn[:, 0] != drawn[:, 1]).all()
    counts = np.bincount(drawn[:, 0], minlength=3) / 4000
    np.testing.assert_allclose(counts, np.array([6, 3, 2]) / 11, atol=0.03)  # 1, 1/2 and 1/3 by rank


def test_plrs_workers_do_not_import_jax():
    with jaxvec.make(plr.Maze, 2, num_workers=1, reset_options=plr.LEVEL) as envs:
        envs.reset()
        (modules,) = {frozenset(names) for names in envs.map(lambda env: [*sys.modules])}
        assert not {"jax", "jaxlib", "flax", "optax"} & modules


def test_ippo_masks_agents_that_left():
    pytest.importorskip("pettingzoo", reason="the extra of its name has pettingzoo")
    from support import leaving_agents

    from jaxvec.adapters.pettingzoo import INFO, PettingZooEnv

    config = ippo.Config(num_envs=2, num_steps=8, num_minibatches=1)
    with jaxvec.make(
        lambda: PettingZooEnv(leaving_agents.parallel_env()), 2, num_workers=1, info=INFO
    ) as envs:
        team = ippo.make_team(config, envs)
        handle, timestep = jaxvec.reset(envs, seed=0)
        obs = team.encode(timestep.obs)
        assert obs.shape == (2, 3, 5)
        params = team.network.init(KEY, obs)
        stats = ippo.RunningMeanStd.create(obs[0, 0], count=0)
        state = ippo.State(params, (), stats, handle, obs, timestep.info["alive"], ippo.Returns.create())
        state, steps = jax.jit(partial(ippo.collect, team))(state, KEY)
    assert steps.acted[:, 0, 0].tolist() == [True, True, False, False] * 2
    assert steps.acted[:, :, 1:].all()
    assert steps.terminated[:, 0].tolist() == 2 * [
        [False] * 3,
        [True, False, False],
        [False] * 3,
        [False, True, True],
    ]
    assert (steps.done >= steps.terminated).all()
    assert np.isfinite(state.returns.last).sum() == 4
    # Rows of agents that left have no weight in the loss.
    zeros = jnp.zeros_like(steps.reward)
    batch = shared_ppo.Batch(steps.obs, steps.action, steps.log_prob, zeros, zeros)
    batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), batch)
    acted = steps.acted.reshape(-1)
    spoilt = batch._replace(target=jnp.where(acted, 0, 1e6))
    assert ippo.loss(team, params, batch, acted) == ippo.loss(team, params, spoilt, acted)
    assert ippo.loss(team, params, batch, acted) != ippo.loss(team, params, spoilt, jnp.ones_like(acted))


def test_ippo_learns_reports_and_plots(capsys):
    pytest.importorskip("pettingzoo", reason="the extra of its name has pettingzoo")
    options = "--env support.leaving_agents --num-envs 8 --num-workers 1 --num-steps 16 --lr 0.01"
    result = ippo.main([*options.split(), "--total-steps", "4000", "--plot", "curve.png"])
    assert result.env_steps == 4096
    assert result.curve[0] < 2  # of 10 / 3, by chance 1.1
    assert result.mean_return > 2.5
    assert "4,096 env steps" in capsys.readouterr().out
