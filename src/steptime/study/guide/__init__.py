"""Answers to the questions by which a plan is chosen by hand."""
