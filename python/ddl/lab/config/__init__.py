"""Configurations: model, optimizer, training, presets, and the options of every command.

Plain dataclasses without torch, so that `ddl COMMAND --help` answers at once.
"""

from ddl.errors import DivergedError, InputError
from ddl.models.config import BASELINES, PUBLISHED, RESIDUALS, STREAMS, GPTConfig
from ddl.optim import Decay, OptimConfig
from ddl.options import Compress, Residual
from ddl.options import ExpandKind as Expand

from .commands import (
    DemoConfig,
    EvalConfig,
    ExportConfig,
    ImportConfig,
    PrepareConfig,
    SampleConfig,
)
from .comparing import CompareConfig, ReportConfig, SweepConfig
from .exploring import ExploreConfig
from .inspecting import InspectConfig
from .installation import PARTS, BenchConfig, DoctorConfig
from .presets import PRESETS
from .recipes import RECIPES, paper_code
from .training import Tracker, TrainConfig

__all__ = [
    "BASELINES",
    "PARTS",
    "PRESETS",
    "PUBLISHED",
    "RECIPES",
    "RESIDUALS",
    "STREAMS",
    "BenchConfig",
    "CompareConfig",
    "Compress",
    "Decay",
    "DemoConfig",
    "DivergedError",
    "DoctorConfig",
    "EvalConfig",
    "Expand",
    "ExploreConfig",
    "ExportConfig",
    "GPTConfig",
    "ImportConfig",
    "InputError",
    "InspectConfig",
    "OptimConfig",
    "PrepareConfig",
    "ReportConfig",
    "Residual",
    "SampleConfig",
    "SweepConfig",
    "Tracker",
    "TrainConfig",
    "paper_code",
]
