"""pygame's surfaces."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from jaxvec._slices._snapshots._core import KEPT, Node, Putter, TakesParts

# What is drawn on anew for each picture, by the names that envs use.
CANVASES = frozenset({"canvas", "screen", "surf", "surface", "window", "window_surface"})


class Picture(Node):
    """A surface of pygame, such as a sprite's, which is shared: envs replace it, and don't draw on it."""

    __slots__ = ("surface",)

    def __init__(self, surface: Any) -> None:
        self.surface = surface

    def put(self, putter: Putter, old: Any) -> Any:
        return self.surface

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.surface.get_size(), other.surface.get_size()

    def __reduce__(self) -> Any:
        pygame: Any = importlib.import_module("pygame")
        pixels = pygame.image.tobytes(self.surface, "RGBA")
        return _picture, (pixels, self.surface.get_size(), self.surface.get_flags())


def _picture(pixels: bytes, size: tuple[int, int], flags: int) -> Picture:
    pygame: Any = importlib.import_module("pygame")
    surface = pygame.Surface(size, flags, 32)
    surface.blit(pygame.image.frombytes(pixels, size, "RGBA"), (0, 0))
    return Picture(surface)


def take_picture(taker: TakesParts, value: Any) -> Any:
    pygame: Any = importlib.import_module("pygame")
    if pygame.display.get_init() and value is pygame.display.get_surface():
        return KEPT
    node = Picture(value)
    taker.remember(value, node)
    return node
