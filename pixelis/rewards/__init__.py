"""Reward terms: pure functions of a trajectory and its group.

What could not be computed is unscored, never 0. No ray.
"""
