"""Reads a training log or a profiler trace and says where time is lost, compared with the prediction."""

from steptime.doctor.diagnose import diagnose_log, diagnose_trace
from steptime.doctor.findings import memory_is_off
from steptime.doctor.log import device_contradictions, fitted_framework, read_log
from steptime.doctor.records import Compared, Diagnosis, Finding, Log, Stated, TraceTimes, Variant, Verdict, series_of
from steptime.doctor.source import kind_of
from steptime.doctor.stated import (
    StatedJob,
    catalogue_model,
    framework_of,
    held_against,
    merged,
    model_contradictions,
    stated_by_trace,
)
from steptime.doctor.timeline import trace_times
from steptime.doctor.trace import read_trace

__all__ = [
    "Compared",
    "Diagnosis",
    "Finding",
    "Log",
    "Stated",
    "StatedJob",
    "TraceTimes",
    "Variant",
    "Verdict",
    "catalogue_model",
    "device_contradictions",
    "diagnose_log",
    "diagnose_trace",
    "fitted_framework",
    "framework_of",
    "held_against",
    "kind_of",
    "memory_is_off",
    "merged",
    "model_contradictions",
    "read_log",
    "read_trace",
    "series_of",
    "stated_by_trace",
    "trace_times",
]
