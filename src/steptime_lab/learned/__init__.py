"""Learned corrections of predicted times and memory: graphs made and measured here, models, splits, scores."""
