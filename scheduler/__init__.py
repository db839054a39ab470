"""The scheduler's room: pure policy over ids and integers, standard library only."""

from __future__ import annotations

from shardline.scheduler.config import SchedulerConfig
from shardline.scheduler.errors import InvalidParameterError, QueueFullError, RequestTooLargeError, SchedulerError
from shardline.scheduler.params import SamplingParams
from shardline.scheduler.plan import SampledToken, SequenceRun, SequenceStart, StepPlan, StepResult
from shardline.scheduler.request import NewRequest, SchedulerStats, SequenceUpdate
from shardline.scheduler.scheduler import Scheduler

__all__ = [
    "InvalidParameterError",
    "NewRequest",
    "QueueFullError",
    "RequestTooLargeError",
    "SampledToken",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerStats",
    "SequenceRun",
    "SequenceStart",
    "SequenceUpdate",
    "StepPlan",
    "StepResult",
]
