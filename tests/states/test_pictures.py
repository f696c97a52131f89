"""States of envs with pygame's surfaces and fonts."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from support.env_states import WAYS, assert_exact_or_refused, copied
from support.probe import StatefulEnv

import jaxvec

pygame = pytest.importorskip("pygame", reason="pygame is not installed")


class Canvas(gymnasium.Env):
    """Draws on a surface, and observes all of its bytes."""

    def __init__(self, name="canvas", make=lambda: pygame.Surface((4, 3))):
        self.count, self.name = 0, name
        setattr(self, name, make())

    def step(self, action):
        self.count += 1
        surface, n = getattr(self, self.name), int(action) + self.count
        surface.set_at((n % 3, n % 2), (n, 2 * n, 3 * n, 100))
        if n % 4 == 0:
            surface.set_clip((n % 2, 0, 2, 2))
            surface.set_alpha(n)
            surface.set_colorkey((n, 0, 0))
        if n % 5 == 0 and surface.get_bitsize() == 8:
            surface.set_palette_at(n % 3, (n, n, n))
        settings = surface.get_clip(), surface.get_alpha(), surface.get_colorkey()
        values = [surface.get_at((x, y)) for x in range(3) for y in range(2)]
        return np.array([hash((str(settings), str(values))) % 10**9]), 0.0, False, False, {}


SURFACES = {
    "canvas": Canvas,
    "another name": partial(Canvas, "board"),
    "alpha": partial(Canvas, "board", lambda: pygame.Surface((4, 3), pygame.SRCALPHA)),
    "24 bits": partial(Canvas, "board", lambda: pygame.Surface((5, 3), 0, 24)),
    "palette": partial(Canvas, "board", lambda: pygame.Surface((5, 3), 0, 8)),
}


@pytest.mark.parametrize("name", SURFACES)
@pytest.mark.parametrize("how", WAYS)
def test_surfaces_that_are_drawn_on_are_exact(name, how):
    assert_exact_or_refused(SURFACES[name], how)


def held_by(**attributes):
    env = gymnasium.Env()
    vars(env).update(attributes)
    return env, StatefulEnv(env)


def test_a_part_of_a_surface_stays_a_part():
    board = pygame.Surface((4, 3))
    env, stateful = held_by(part=board.subsurface((1, 1, 2, 2)), board=board)
    state = stateful.save()
    for each in (state, copied(state)):
        env.part = env.board = None
        stateful.restore(each)
        env.part.set_at((0, 0), (5, 6, 7))
        assert env.board.get_at((1, 1)) == (5, 6, 7, 255)
        assert env.part.get_parent() is env.board


def test_states_share_the_pixels_of_an_unchanged_surface():
    env, stateful = held_by(board=pygame.Surface((4, 3)))
    states = [stateful.save() for _ in range(2)]
    env.board.fill((1, 2, 3))
    states.append(stateful.save())
    one, other, third = (state.layers[0][1]["board"] for state in states)
    assert one is other is not third


class Sprite(pygame.Surface):
    pass


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: Sprite((2, 2)), "extends pygame.Surface"),
        (lambda: pygame.surfarray.pixels2d(pygame.Surface((2, 2))), "memory of a pygame surface"),
    ],
)
def test_other_pictures_are_refused(make, what):
    with pytest.raises(jaxvec.EnvStateError, match=f"attribute Env.held.*{what}"):
        held_by(held=make())[1].save()


def test_a_font_keeps_its_settings():
    pygame.font.init()
    small, large = pygame.font.Font(None, 20), pygame.font.Font(None, 40)
    env, stateful = held_by(font=small)
    state = stateful.save()
    small.bold, env.font = True, large
    stateful.restore(state)
    assert env.font.size("jaxvec") == pygame.font.Font(None, 20).size("jaxvec")
    assert not env.font.bold
    env.font = None
    with pytest.raises(jaxvec.EnvStateError, match="no font like"):
        stateful.restore(copied(state))


def test_a_window_stays_with_its_env(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.display.init()
    try:
        window = pygame.display.set_mode((4, 3))
        env, stateful = held_by(screen=window)
        window.fill((1, 2, 3))
        state = stateful.save()
        window.fill((4, 5, 6))
        stateful.restore(state)
        assert env.screen is window
        assert window.get_at((3, 2)) == (1, 2, 3, 255)
        env.screen = None
        stateful.restore(state)
        assert env.screen is None
    finally:
        pygame.display.quit()
