"""The parts of `jaxvec.ports`, which compares a JAX env with the Python env of which it is a port."""
