"""Diagnosis of a training log or a profiler trace: where time is lost, compared with the prediction."""

from steptime.doctor.diagnose import diagnose_log as diagnose_log
from steptime.doctor.diagnose import diagnose_trace as diagnose_trace
from steptime.doctor.findings import memory_is_off as memory_is_off
from steptime.doctor.log import device_contradictions as device_contradictions
from steptime.doctor.log import fitted_framework as fitted_framework
from steptime.doctor.log import read_log as read_log
from steptime.doctor.records import Compared as Compared
from steptime.doctor.records import Diagnosis as Diagnosis
from steptime.doctor.records import Finding as Finding
from steptime.doctor.records import Log as Log
from steptime.doctor.records import Stated as Stated
from steptime.doctor.records import TraceTimes as TraceTimes
from steptime.doctor.records import Variant as Variant
from steptime.doctor.records import Verdict as Verdict
from steptime.doctor.records import series_of as series_of
from steptime.doctor.source import kind_of as kind_of
from steptime.doctor.stated import StatedJob as StatedJob
from steptime.doctor.stated import catalogue_model as catalogue_model
from steptime.doctor.stated import framework_of as framework_of
from steptime.doctor.stated import held_against as held_against
from steptime.doctor.stated import merged as merged
from steptime.doctor.stated import model_contradictions as model_contradictions
from steptime.doctor.stated import stated_by_trace as stated_by_trace
from steptime.doctor.stated import with_batch as with_batch
from steptime.doctor.timeline import trace_times as trace_times
from steptime.doctor.trace import read_trace as read_trace
