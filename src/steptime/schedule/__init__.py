"""Order of the passes of a step: schedules as tables of actions.

:data:`SCHEDULES` has the schedules by name; a module of this package that has schedules is imported here, those of
other rooms and packages are entry points.
"""

from steptime.schedule import synchronous  # noqa: F401, I001
from steptime.schedule import zero_bubble  # noqa: F401
from steptime.schedule import bidirectional  # noqa: F401
from steptime.schedule import sequence  # noqa: F401
from steptime.schedule import asynchronous  # noqa: F401
from steptime.schedule.actions import ActionTable, Kind
from steptime.schedule.schedules import SCHEDULES, Pipeline, Schedule, Times

__all__ = ["SCHEDULES", "ActionTable", "Kind", "Pipeline", "Schedule", "Times"]
