"""Scores tables of measurements: reads, predicts, summarises and writes them row by row."""
