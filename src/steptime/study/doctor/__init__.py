"""Reads a training log or a profiler trace and says where the time goes that should not, beside the prediction."""

from steptime.study.doctor.behaviour import fitted_framework
from steptime.study.doctor.devices import device_contradictions
from steptime.study.doctor.diagnose import diagnose_log, diagnose_trace
from steptime.study.doctor.findings import memory_is_off
from steptime.study.doctor.log import read_log
from steptime.study.doctor.records import Compared, Diagnosis, Finding, Log, Stated, TraceTimes, Variant, Verdict
from steptime.study.doctor.series import series_of
from steptime.study.doctor.source import kind_of
from steptime.study.doctor.stated import (
    StatedJob,
    catalogue_model,
    framework_of,
    held_against,
    merged,
    model_contradictions,
    stated_by_trace,
)
from steptime.study.doctor.timeline import trace_times
from steptime.study.doctor.trace import read_trace

__all__ = [
    "Compared", "Diagnosis", "Finding", "Log", "Stated", "StatedJob", "TraceTimes", "Variant", "Verdict",
    "catalogue_model", "device_contradictions", "diagnose_log", "diagnose_trace", "fitted_framework", "framework_of",
    "held_against", "kind_of", "memory_is_off", "merged", "model_contradictions", "read_log", "read_trace", "series_of",
    "stated_by_trace", "trace_times",
]  # fmt: skip
