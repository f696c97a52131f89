"""Running statistics to normalise observations and rewards inside `jit`.

They are equal to those of Gymnasium's `NormalizeObservation` and Stable-Baselines3's `VecNormalize`. As a
pytree, they can be carried through `scan` and saved together with the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, final

import jax
import jax.numpy as jnp

__all__ = ["RunningMeanStd"]


@final
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RunningMeanStd:
    """The running mean and variance of each element of a pytree of arrays; itself a pytree.

    Means and variances are float32: an update that would change one by less than a ten millionth is lost.

    Attributes:
        mean: Pytree with float32 leaves `[...]`.
        var: Pytree with float32 leaves `[...]`, the population variance, as in NumPy.
        count: Number of values, float32 `[]`.
        remainder: The part of the number of values that `count` lacks because of its rounding, float32 `[]`.
            So each value counts, also after more than 2**24 of them.

    Example:
        ```python
        stats = jaxvec.normalize.RunningMeanStd.create(jnp.zeros(2))
        stats = stats.update(jnp.array([[0.0, 10.0], [2.0, 30.0]]))
        print(stats.mean.round(), stats.normalize(jnp.array([2.0, 30.0])).round())  # [ 1. 20.] [1. 1.]
        ```
    """

    mean: Any
    var: Any
    count: jax.Array
    remainder: jax.Array = field(default_factory=lambda: jnp.float32(0))

    @classmethod
    def create(cls, like: Any, *, count: float = 1e-4) -> Self:
        """Returns initial statistics, with mean 0 and variance 1.

        Args:
            like: One env's value: a pytree of arrays or `jax.ShapeDtypeStruct`s `[...]`.
            count: Weight of the initial mean and variance, as a number of values; 1e-4 as in Gymnasium.

        Example:
            ```python
            stats = jaxvec.normalize.RunningMeanStd.create({"speed": jax.ShapeDtypeStruct((3,), "float32")})
            print(stats.mean["speed"], stats.var["speed"])  # [0. 0. 0.] [1. 1. 1.]
            ```
        """
        mean = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), jnp.float32), like)
        return cls(mean, jax.tree.map(jnp.ones_like, mean), jnp.float32(count))

    def update(self, batch: Any) -> Self:
        """Returns the statistics updated with a batch of values.

        Args:
            batch: Pytree of values with leading batch axes, such as `[num_steps, num_envs, ...]`.

        Raises:
            ValueError: The structure or a shape does not match.

        Example:
            ```python
            stats = jaxvec.normalize.RunningMeanStd.create(0.0)
            stats = stats.update(jnp.ones((10, 4)))  # [num_steps, num_envs] from a scan
            print(stats.count.round(), stats.mean.round())  # 40.0 1.0
            ```
        """
        means, structure = jax.tree.flatten(self.mean)
        shapes = set(map(_axes_before, means, structure.flatten_up_to(batch)))
        if len(shapes) != 1:
            raise ValueError(f"all leaves of a batch need the same leading axes, not {shapes}")
        (shape,) = shapes
        axes = tuple(range(len(shape)))
        number = jnp.prod(jnp.array(shape, jnp.float32))
        fraction = number / (self.count + number)

        def move(mean: jax.Array, values: Any) -> jax.Array:
            return mean + fraction * (jnp.mean(values, axes, jnp.float32) - mean)

        def spread(mean: jax.Array, var: jax.Array, values: Any) -> jax.Array:
            values = jnp.asarray(values, jnp.float32)
            between = (1 - fraction) * jnp.square(values.mean(axes) - mean)
            return (1 - fraction) * var + fraction * (values.var(axes) + between)

        mean = jax.tree.map(move, self.mean, batch)
        var = jax.tree.map(spread, self.mean, self.var, batch)
        # Compensated summation, which works because XLA does not reorder operations on floats.
        more = number + self.remainder
        count = self.count + more
        return type(self)(mean, var, count, more - (count - self.count))

    def normalize(self, values: Any, *, epsilon: float = 1e-8, clip: float = 10.0) -> Any:
        """Scales values to mean 0 and variance 1. Returns float32.

        Args:
            values: Pytree with leaves `[..., *shape]`, with any number of leading axes.
            epsilon: Constant added to the variance.
            clip: Maximum magnitude of the result, in standard deviations; `jnp.inf` for no limit.

        Example:
            ```python
            stats = jaxvec.normalize.RunningMeanStd.create(0.0).update(jnp.array([3.0, 7.0]))
            print(stats.normalize(jnp.array([5.0, 7.0, 99.0])).round())  # [ 0.  1. 10.]
            ```
        """
        centred = jax.tree.map(lambda mean, leaf: _float32(leaf) - _like(leaf, mean), self.mean, values)
        return self.scale(centred, epsilon=epsilon, clip=clip)

    def scale(self, values: Any, *, epsilon: float = 1e-8, clip: float = 10.0) -> Any:
        """Scales values to variance 1 without shifting them, as needed for rewards. Returns float32.

        Args:
            values: Pytree with leaves `[..., *shape]`.
            epsilon: Constant added to the variance.
            clip: Maximum magnitude of the result; `jnp.inf` for no limit.

        Example:
            ```python
            stats = jaxvec.normalize.RunningMeanStd.create(0.0).update(jnp.array([3.0, 7.0]))
            print(stats.scale(jnp.array([-2.0, 0.0, 6.0])).round())  # [-1.  0.  3.]
            ```
        """

        def convert(var: jax.Array, values: Any) -> jax.Array:
            scale = jax.lax.rsqrt(var + epsilon)
            return jnp.clip(_float32(values) * _like(values, scale), -clip, clip)

        return jax.tree.map(convert, self.var, values)


def _float32(leaf: Any) -> jax.Array:
    return jnp.asarray(leaf, jnp.float32)


def _like(leaf: Any, statistic: jax.Array) -> jax.Array:
    """Returns a statistic with the shape of a leaf: programs may forbid that JAX broadcasts implicitly."""
    return jnp.broadcast_to(statistic, jnp.shape(leaf))


def _axes_before(mean: jax.Array, values: Any) -> tuple[int, ...]:
    shape = jnp.shape(values)
    number = len(shape) - mean.ndim
    if number < 1 or shape[number:] != mean.shape:
        raise ValueError(f"batch: expected leading axes followed by {mean.shape}, got shape {shape}")
    return shape[:number]
