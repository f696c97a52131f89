"""Requests to the envs of a pool, and their answers: between threads and between processes."""
