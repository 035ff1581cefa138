"""Choosing limits: capacity from numbers, measurements or probes; shares, a policy file, and a tuning loop."""

from .capacity_formula import Capacity, Ceiling, capacity
from .limit_plan import Plan, make_plan
from .limit_shares import Share, Split, split
from .load_latency_curve import LoadStep
from .log_replay import RuleReplay, replay
from .measured_capacity import Analysis, analyze
from .measurement_files import LogReader, Measurements, read_measurements
from .percentiles import LatencySamples, interpolated, nearest_rank
from .policy_writer import policy_text
from .probe import Probe, ProbeSettings, probe
from .report import Report
from .scalability_law import Scalability, fit_scalability
from .slo import Slo
from .suggest import Suggestion, Suggestions, suggest_from_log, suggest_from_metrics

__all__ = [
    "Analysis",
    "Capacity",
    "Ceiling",
    "LatencySamples",
    "LoadStep",
    "LogReader",
    "Measurements",
    "Plan",
    "Probe",
    "ProbeSettings",
    "Report",
    "RuleReplay",
    "Scalability",
    "Share",
    "Slo",
    "Split",
    "Suggestion",
    "Suggestions",
    "analyze",
    "capacity",
    "fit_scalability",
    "interpolated",
    "make_plan",
    "nearest_rank",
    "policy_text",
    "probe",
    "read_measurements",
    "replay",
    "split",
    "suggest_from_log",
    "suggest_from_metrics",
]
