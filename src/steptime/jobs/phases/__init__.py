"""Preference and reinforcement learning: a step as phases of several models on the same devices."""
