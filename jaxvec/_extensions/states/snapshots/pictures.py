"""Nodes of pygame's surfaces and fonts."""

from __future__ import annotations

import copy
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxvec._extensions.states.snapshots.nodes import CannotCopy, Node, Restorer, Saver


def _pygame() -> Any:
    return importlib.import_module("pygame")


@dataclass(slots=True, eq=False)
class _Picture(Node):
    """A surface with memory of its own. Snapshots share the pixels of a surface that was not drawn on.

    Attributes:
        form: Size, depth and masks.
        settings: Palette, colour key, alpha and clipping area.
        is_window: Whether it was the window. An env without a window does not get one.
    """

    form: Any
    settings: Any
    pixels: NDArray[np.uint8]
    is_window: bool

    def restore(self, restorer: Restorer, old: Any) -> Any:
        is_surface = type(old) is _pygame().Surface
        if is_surface and _is_window(old):  # it stays with its env
            _set(old, self.settings)
            old.blit(self._write(_make(self.form)), (0, 0))
            return old
        if self.is_window and not is_surface:
            return old
        fits = is_surface and old.get_parent() is None and _form(old) == self.form and restorer.reuse(old)
        target = self._write(old if fits else _make(self.form))
        _set(target, self.settings)
        return target

    def _write(self, surface: Any) -> Any:
        _memory(surface)[:] = self.pixels
        return surface

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.form, other.form
        yield "", self.settings, other.settings
        yield "", self.pixels, other.pixels


@dataclass(slots=True, eq=False)
class _PicturePart(Node):
    """A surface in the memory of another one."""

    owner: Any
    area: tuple[int, ...]
    settings: Any

    def restore(self, restorer: Restorer, old: Any) -> Any:
        before = old.get_parent() if isinstance(old, _pygame().Surface) else None
        owner = restorer.value(self.owner, before)
        fits = owner is before and _area(old) == self.area and restorer.reuse(old)
        target = old if fits else owner.subsurface(self.area)
        _set(target, self.settings)
        return target


def save_picture(saver: Saver, value: Any) -> Any:
    pygame = _pygame()
    if type(value) is not pygame.Surface:
        raise CannotCopy("it is of a class that extends pygame.Surface, which may hold more")
    try:
        if (parent := value.get_parent()) is not None:
            return saver.remember(value, _PicturePart(saver.value(parent), _area(value), _settings(value)))
        form, settings, pixels = _form(value), _settings(value), _memory(value)
    except pygame.error as error:
        raise CannotCopy(f"the surface can't be read ({error})") from error
    known = saver.shared.get(id(value))
    if type(known) is not _Picture or (known.form, known.settings) != (form, settings):
        known = None
    if known is None or not np.array_equal(known.pixels, pixels):
        known = saver.shared[id(value)] = _Picture(form, settings, pixels.copy(), _is_window(value))
    return saver.remember(value, known)


def _is_window(surface: Any) -> bool:
    display = _pygame().display
    return display.get_init() and display.get_surface() is surface


def _form(surface: Any) -> Any:
    return surface.get_size(), surface.get_bitsize(), surface.get_masks()


def _area(surface: Any) -> tuple[int, ...]:
    return (*surface.get_offset(), *surface.get_size())


def _make(form: Any) -> Any:
    pygame = _pygame()
    size, depth, masks = form
    return pygame.Surface(size, pygame.SRCALPHA if masks[3] else 0, depth, masks)


def _settings(surface: Any) -> Any:
    palette = [tuple(color) for color in surface.get_palette()] if surface.get_bitsize() <= 8 else None
    return palette, surface.get_colorkey(), surface.get_alpha(), tuple(surface.get_clip())


def _set(surface: Any, settings: Any) -> None:
    if _settings(surface) != settings:
        palette, key, alpha, clip = settings
        if palette is not None:
            surface.set_palette(palette)
        surface.set_colorkey(key)
        surface.set_alpha(alpha)
        surface.set_clip(clip)


def _memory(surface: Any) -> NDArray[np.uint8]:
    """Returns the pixels, without a copy. The surface is locked while the array exists."""
    return np.frombuffer(surface.get_buffer(), np.uint8)


@dataclass(slots=True, eq=False)
class _Font(Node):
    """A font: its settings are part of the state, and the file with its letters is not.

    Attributes:
        font: The font itself; `None` in another process.
    """

    font: Any
    settings: dict[str, Any]

    def restore(self, restorer: Restorer, old: Any) -> Any:
        for font in (old, self.font):
            is_font = font is not None and _setting_names(type(font)) == tuple(self.settings)
            if is_font and _adjust(font, self.settings) and restorer.reuse(font):
                return font
        raise CannotCopy("the env has no font like the one of the state in this place")

    def parts(self, other: Any) -> Iterator[tuple[str, Any, Any]]:
        yield "", self.settings, other.settings

    def __reduce__(self) -> Any:
        return _Font, (None, self.settings)


def save_font(saver: Saver, value: Any) -> Any:
    settings = {name: copy.copy(getattr(value, name)) for name in _setting_names(type(value))}
    return saver.remember(value, _Font(value, settings))


def _adjust(font: Any, settings: dict[str, Any]) -> bool:
    """Sets the settings that differ; returns False if one of them is fixed, as of another font."""
    try:
        for name, value in settings.items():
            if getattr(font, name) != value:
                setattr(font, name, value)
    except AttributeError:
        return False
    return True


@cache
def _setting_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name, held in vars(kind).items() if type(held) is types.GetSetDescriptorType)
