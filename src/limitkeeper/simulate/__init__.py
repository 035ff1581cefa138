"""Simulations on a virtual clock: clients, gateways and services with the real limits, and fault schedules of the real stores.

`limitkeeper simulate` runs the first, `python -m limitkeeper.simulate.faults` the second.
"""

from .fault_run import History, run_schedule, schedule_of
from .fault_schedule import Schedule
from .history_check import broken_promises
from .scenario import Scenario
from .simulation import Result, Simulation

__all__ = ["History", "Result", "Scenario", "Schedule", "Simulation", "broken_promises", "run_schedule", "schedule_of"]
