"""Nodes of pygame's surfaces."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._extensions.states.snapshots.nodes import KEPT, CannotCopy, Node, Restorer, Saver


@dataclass(slots=True, eq=False)
class _Picture(Node):
    """A surface with memory of its own. Snapshots share the pixels of a surface that was not drawn on.

    Attributes:
        form: Size, depth and masks.
        settings: Colour key, alpha, clipping area, and the palette of up to 8 bits.
    """

    form: Any
    settings: Any
    pixels: NDArray[np.uint8]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        pygame = importlib.import_module("pygame")
        is_surface = type(old) is pygame.Surface and old.get_parent() is None
        fits = is_surface and _form(old) == self.form and restorer.reuse(old)
        if fits:
            target = old
        else:
            size, depth, masks = self.form
            target = pygame.Surface(size, pygame.SRCALPHA if masks[3] else 0, depth, masks)
        _memory(target)[:] = self.pixels
        color_key, alpha, clip, palette = self.settings
        if palette is not None:
            target.set_palette(palette)
        target.set_colorkey(color_key)
        target.set_alpha(alpha)
        target.set_clip(clip)
        return target

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", (self.form, self.settings), (other.form, other.settings)
        yield "", self.pixels, other.pixels


def save_picture(saver: Saver, value: Any) -> Any:
    """Takes a surface. A window stays with its env as it is."""
    pygame = importlib.import_module("pygame")
    if type(value) is not pygame.Surface:
        raise CannotCopy("it is of a class that extends pygame.Surface, which may hold more")
    if pygame.display.get_init() and pygame.display.get_surface() is value:
        return KEPT
    if value.get_parent() is not None:
        raise CannotCopy("it is a part of another surface", "Keep a copy of it")
    form = _form(value)
    palette = [tuple(color) for color in value.get_palette()] if value.get_bitsize() <= 8 else None
    settings = value.get_colorkey(), value.get_alpha(), tuple(value.get_clip()), palette
    pixels = _memory(value)
    known = saver.shared.get(id(value))
    if (
        type(known) is not _Picture
        or (known.form, known.settings) != (form, settings)
        or not np.array_equal(known.pixels, pixels)
    ):
        known = _Picture(form, settings, pixels.copy())
        saver.shared[id(value)] = known
    return saver.remember(value, known)


def _form(surface: Any) -> Any:
    return surface.get_size(), surface.get_bitsize(), surface.get_masks()


def _memory(surface: Any) -> NDArray[np.uint8]:
    """Returns the pixels, without a copy. The surface is locked while the array exists."""
    return np.frombuffer(surface.get_buffer(), np.uint8)
