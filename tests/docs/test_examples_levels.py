"""The examples of levels and of several agents: `plr` and `ippo`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import plr
import pytest
from support.runs import assert_same_params

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
    ippo = pytest.importorskip("ippo", reason="PettingZoo is not installed", exc_type=ImportError)
    from support import leaving_agents

    config = ippo.Config(num_envs=2, num_steps=8, num_minibatches=1)
    with jaxvec.make(
        lambda: ippo.PettingZooEnv(leaving_agents.parallel_env()), 2, num_workers=1, info=ippo.INFO
    ) as envs:
        names = envs.get_attr("possible_agents")[0]
        agent = ippo.Agent(config, names, envs.single_observation_space, envs.single_action_space)
        state, playing = agent.begin(*jaxvec.reset(envs, seed=0))
        assert playing.obs.shape == (2, 3, 5)
        _, episodes, steps = jax.jit(agent.collect)(state, playing, KEY)
    assert steps.acted[:, 0, 0].tolist() == [True, True, False, False] * 2
    assert steps.acted[:, :, 1:].all()
    assert steps.terminated[:, 0].tolist() == 2 * [
        [False] * 3,
        [True, False, False],
        [False] * 3,
        [False, True, True],
    ]
    assert (steps.done >= steps.terminated).all()
    assert episodes.total == 4
    assert episodes.means()["episode_length"] == 4
    # An episode's return is the mean of its agents' returns.
    rewards = steps.reward.reshape(2, 4, 2, 3).sum(1).mean(-1)  # [episode, env]
    np.testing.assert_allclose(episodes.means()["episode_return"], rewards.mean(), rtol=1e-6)
    # Rows of agents that left have no weight in the loss.
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:]), steps)
    zeros, all_acted = jnp.zeros_like(rows.reward), rows._replace(acted=jnp.ones_like(rows.acted))
    spoilt = jnp.where(rows.acted, 0, 1e6)
    loss, _ = agent.loss(state.params, rows, zeros, zeros)
    assert loss == agent.loss(state.params, rows, zeros, spoilt)[0]
    assert loss != agent.loss(state.params, all_acted, zeros, spoilt)[0]


LEAVING = "--env support.leaving_agents --num-envs 8 --num-workers 1 --num-steps 16 --lr 0.01"


def test_ippo_learns():
    ippo = pytest.importorskip("ippo", reason="PettingZoo is not installed", exc_type=ImportError)
    run = ippo.main([*LEAVING.split(), "--total-steps", "4000"])
    assert run.env_steps == 4096
    assert run.metrics()["episode_return"][0] < 2  # of 10 / 3, by chance 1.1
    assert run.latest("episode_return") > 2.5


@pytest.mark.nightly
def test_ippo_resumed_equals_an_uninterrupted_run():
    ippo = pytest.importorskip("ippo", reason="PettingZoo is not installed", exc_type=ImportError)
    words = [*LEAVING.split(), "--total-steps", "900", "--save-every", "2", "--name"]
    assert ippo.main([*words, "whole"]).env_steps == 1024
    assert ippo.main([*words, "half", "--stop-at=-1e9"]).env_steps < 1024
    assert ippo.main(["--resume", "runs/half", "--stop-at", "1e9"]).env_steps == 1024
    assert_same_params("runs/half", "runs/whole")
    with np.load("runs/half/state.npz") as half, np.load("runs/whole/state.npz") as whole:
        assert {*half} == {*whole}
        for name in {*half} - {"envs"}:  # pickles, whose bytes depend on which objects are shared
            np.testing.assert_array_equal(half[name], whole[name], name)


def test_ippo_names_the_module_that_is_missing():
    ippo = pytest.importorskip("ippo", reason="PettingZoo is not installed", exc_type=ImportError)
    with pytest.raises(SystemExit, match=r"--env no_module.env: No module named 'no_module'"):
        ippo.main(["--env", "no_module.env"])
