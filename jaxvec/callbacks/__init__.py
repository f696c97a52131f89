"""The JAX face: the only part of jaxvec that imports jax."""
