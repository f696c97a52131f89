"""What steps envs, in a worker or in this process: a slice of a pool, and all that it takes of each env."""
