"""Rollouts that actors of a Ray cluster make, each in a pool of its own, for a learner in this process."""
