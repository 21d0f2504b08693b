"""Pipelines played event by event: steps of a job, schedules searched for, their traces and reports."""
