"""Limits on what runs at the same time, and on the calls that a service makes."""

from ..errors import BulkheadFull
from .adaptive_bulkhead import AIMD, AdaptiveBulkhead, AdaptiveCall, Gradient2
from .bulkhead import Bulkhead
from .dependency_rate_caps import Dependencies, Dependency, DependencyCap
from .distributed_bulkhead import DistributedBulkhead
from .load_shedder import LoadShedder
from .paced_executor import Shaper
from .shape import ShapedIterator, shape

__all__ = [
    "AIMD",
    "AdaptiveBulkhead",
    "AdaptiveCall",
    "Bulkhead",
    "BulkheadFull",
    "Dependencies",
    "Dependency",
    "DependencyCap",
    "DistributedBulkhead",
    "Gradient2",
    "LoadShedder",
    "ShapedIterator",
    "Shaper",
    "shape",
]
