"""The examples of levels and of several agents: `plr` and `ippo`."""

import os
import re
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.runs import assert_same_leaves, assert_same_params, assert_same_state, load_state

import jaxvec
from jaxvec.examples import maze, plr
from jaxvec.logging import Run

KEY = jax.random.key(0)


pytestmark = pytest.mark.usefixtures("in_tmp_path")


PLR = "--num-seeds 2 --num-envs 4 --num-workers 2 --num-batches 1 --num-minibatches 2 --total-steps 1900"


@pytest.mark.slow
@pytest.mark.jax_version
def test_plr_trains_all_agents_in_one_program(capsys):
    run = plr.main([*PLR.split(), "--buffer-size", "8", "--save-every", "0", "--name", "a"])
    metrics = run.metrics()
    assert metrics["env_steps"].tolist() == [480, 960, 960, 1440, 1440, 1920, 1920]
    tests = np.isfinite(metrics["evaluation"])
    assert tests.tolist() == [False, *[False, True] * 3]
    for way in ("", "uniform_"):
        seeds = np.array([metrics[f"{way}evaluation_{seed}"][tests] for seed in range(2)])
        assert ((seeds >= 0) & (seeds <= 1)).all()
        np.testing.assert_allclose(metrics[f"{way}evaluation"][tests], seeds.mean(0))
        for name in ("episode_return", "walls"):
            values = metrics[f"{way}{name}"][~tests]
            assert ((values >= 0) & (values <= 1)).all()
        for name in ("policy_loss", "value_loss", "entropy", "kl", "explained_variance"):
            assert np.isfinite(metrics[f"{way}{name}"][~tests]).all()
    walls = np.concatenate([metrics["walls"][~tests], metrics["uniform_walls"][~tests]])
    assert len(set(walls.tolist())) == 8
    levels = load_state("runs/a")["leaves"]["['learned'].agents.buffer.level['walls']"]
    assert len({agent.tobytes() for agent in levels}) == 4  # each agent has levels of its own
    printed = capsys.readouterr().out
    assert printed.startswith(f"score {run.latest('evaluation'):.6g}: mean ")
    assert f"{4 * 4 * maze.TIME_LIMIT:,} env steps\nresults are in runs/a\n" in printed
    plr.main(["--evaluate", "runs/a"])
    assert capsys.readouterr().out.startswith(f"mean return {run.latest('evaluation'):.6g} ± ")


@pytest.mark.nightly
def test_plr_replays_with_the_agents_that_it_says():
    """A buffer as large as the number of envs, without mutations, always gives the same levels."""
    words = [*PLR.split(), *["--buffer-size", "4", "--replay", "1", "--mutation", "0", "--name", "a"]]
    metrics = plr.main(words).metrics()
    walls, uniform = (metrics[name][:4] for name in ("walls", "uniform_walls"))
    np.testing.assert_allclose(walls, walls[0], rtol=1e-5)
    assert np.unique(uniform).size == 4


@pytest.mark.nightly
def test_plr_resumed_after_a_signal_equals_an_uninterrupted_run(monkeypatch):
    words = [*PLR.split(), "--buffer-size", "8", "--name"]
    whole = plr.main([*words, "whole"])

    def log(self, env_steps, metrics):
        before(self, env_steps, metrics)
        if env_steps == 480:
            os.kill(os.getpid(), signal.SIGTERM)

    before = Run._log
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(Run, "_log", log)
        plr.main([*words, "half"])
    assert caught.value.code == 130
    assert load_state("runs/half")["env_steps"] < 1920
    resumed = plr.main(["--resume", "runs/half"])
    assert resumed.env_steps == whole.env_steps == 1920
    assert_same_state("runs/half", "runs/whole")
    assert_same_params("runs/half", "runs/whole")
    found, expected = resumed.metrics(), whole.metrics()
    assert {*found} == {*expected}
    for name in {*expected} - {"seconds", "steps_per_second"}:
        np.testing.assert_array_equal(found[name], expected[name], name)


def test_plr_names_its_folder_by_the_class_of_the_env(monkeypatch):
    monkeypatch.setattr(plr, "train", lambda *_: None)
    assert re.fullmatch(r"plr_Maze_3_\d{8}-\d{6}", plr.main(["--seed", "3"]).folder.name)


def test_plrs_maze_shows_walls_goal_and_agent():
    walls = np.zeros((maze.SIZE, maze.SIZE), np.uint8)
    walls[0, 2] = 1
    env = maze.Maze(render_mode="rgb_array")
    env.reset(options={"walls": walls, "start": 1, "goal": maze.SIZE})
    env.step(maze.MOVES.index((0, 1)))  # into the wall
    env.step(maze.MOVES.index((0, -1)))
    image = env.render()
    assert image.shape == (16 * maze.SIZE, 16 * maze.SIZE, 3)
    assert image.dtype == np.uint8
    cells = image.reshape(maze.SIZE, 16, maze.SIZE, 16, 3)
    assert (cells == cells[:, :1, :, :1]).all()
    cells = cells[:, 0, :, 0]
    assert cells[0, 0].tolist() == [220, 0, 0]  # the agent
    assert cells[1, 0].tolist() == [0, 160, 0]  # the goal
    assert cells[0, 2].tolist() == [0, 0, 0]  # the wall
    assert (cells == 255).all(-1).sum() == maze.CELLS - 3


def reachable(level):
    """Returns the cells that can be reached from the start, by breadth-first search."""
    free = {divmod(int(cell), maze.SIZE) for cell in np.flatnonzero(np.ravel(level["walls"]) == 0)}
    start, goal = (divmod(int(level[name]), maze.SIZE) for name in ("start", "goal"))
    free |= {start, goal}
    seen = todo = {start}
    while todo:
        todo = {(y + down, x + right) for y, x in todo for down, right in maze.MOVES} & free - seen
        seen |= todo
    return free, seen, goal


@pytest.mark.slow
def test_plrs_mazes_are_perfect_and_levels_are_in_their_space():
    mazes = maze.perfect_mazes(20)
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
            assert maze.LEVEL.contains(
                {
                    "walls": np.asarray(one["walls"][number]),
                    "start": np.int64(one["start"][number]),
                    "goal": np.int64(one["goal"][number]),
                }
            )
    flipped = (levels["walls"] != mutated["walls"]).sum((1, 2))
    assert 3 < flipped.mean() < 7


@pytest.mark.slow
def test_plrs_maze_can_be_solved_exactly_where_a_way_exists():
    """Follows shortest ways, so that walls, starts and goals must be where the level has them."""
    levels = plr.random_levels(KEY, 60)
    env, solved = maze.Maze(), 0
    for number in range(60):
        level = {name: np.asarray(leaf[number]) for name, leaf in levels.items()}
        free, seen, goal = reachable(level)
        obs, _ = env.reset(options=level)
        assert maze.Maze.observation_space.contains(obs)
        if goal not in seen:
            continue
        distance, todo = {goal: 0}, [goal]
        for y, x in todo:
            for at in {(y + down, x + right) for down, right in maze.MOVES} & free - {*distance}:
                distance[at] = distance[y, x] + 1
                todo.append(at)
        place, reward, steps = divmod(int(level["start"]), maze.SIZE), 0, 0
        while place != goal:
            ways = [(place[0] + down, place[1] + right) for down, right in maze.MOVES]
            action = min(range(4), key=lambda one, ways=ways: distance.get(ways[one], 999))
            place, steps = ways[action], steps + 1
            _, reward, terminated, truncated, _ = env.step(action)
            assert (terminated, truncated) == (place == goal, steps == maze.TIME_LIMIT)
        assert reward == pytest.approx(1 - 0.9 * steps / maze.TIME_LIMIT)
        solved += 1
    assert 20 < solved <= 60


@pytest.mark.slow
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
    with jaxvec.make(maze.Maze, 2, num_workers=1, reset_options=maze.LEVEL) as envs:
        envs.reset()
        (modules,) = {frozenset(names) for names in envs.map(lambda env: [*sys.modules])}
        assert not {"jax", "jaxlib", "flax", "optax"} & modules


@pytest.fixture
def ippo():
    reason = "PettingZoo is not installed"
    return pytest.importorskip("jaxvec.examples.ippo", reason=reason, exc_type=ImportError)


@pytest.mark.slow
def test_ippo_masks_agents_that_left(ippo):
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


@pytest.mark.slow
def test_ippo_learns(ippo):
    run = ippo.main([*LEAVING.split(), "--total-steps", "4000"])
    assert run.env_steps == 4096
    assert run.metrics()["episode_return"][0] < 2  # of 10 / 3, by chance 1.1
    assert run.latest("episode_return") > 2.5


@pytest.mark.nightly
def test_ippo_resumed_equals_an_uninterrupted_run(ippo):
    words = [*LEAVING.split(), "--total-steps", "900", "--name"]
    assert ippo.main([*words, "whole"]).env_steps == 1024
    assert ippo.main([*words, "half", "--stop-at=-1e9"]).env_steps < 1024
    assert ippo.main(["--resume", "runs/half", "--stop-at", "1e9"]).env_steps == 1024
    assert_same_params("runs/half", "runs/whole")
    # Not the envs: pickles, whose bytes depend on which objects are shared.
    assert_same_leaves("runs/half", "runs/whole")


def test_ippo_names_the_module_that_is_missing(ippo, capsys):
    with pytest.raises(SystemExit):
        ippo.main(["--env", "no_module.env"])
    assert "--env no_module.env: No module named 'no_module'" in capsys.readouterr().err
