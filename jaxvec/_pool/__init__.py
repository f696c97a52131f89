"""A pool of envs, as one program uses it."""
