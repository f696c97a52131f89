"""Envs and whole rollouts on the nodes of a Ray cluster."""
