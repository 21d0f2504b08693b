"""Learned corrections of predicted times and memory: generated and measured graphs, models, splits, scores."""
