"""Typed configuration: a YAML file and dotted overrides on the command line.

``pixelis rft configs/nano/rft.yaml learner.lr=3e-4 --dry-run`` prints the resolved configuration. A file may
extend others with ``extends:`` (a path relative to itself, or a list of them); later values win. Unknown
keys, wrong types and contradictions are errors that name the path of the key. The defaults suit the embedded
model on a laptop.
"""

from __future__ import annotations

from pixelis.config.base import Section
from pixelis.config.cluster import ClusterConfig
from pixelis.config.command_line import from_command_line
from pixelis.config.data import DataConfig
from pixelis.config.dialogue import DialogueConfig, PixelRangeConfig
from pixelis.config.engine import EngineConfig, SamplingConfig
from pixelis.config.evaluate import EvaluateConfig
from pixelis.config.evolution import (
    AlertsConfig,
    AuditConfig,
    CanaryConfig,
    EvolutionConfig,
    GuardConfig,
    NeighboursConfig,
    ReviewConfig,
    ThresholdConfig,
    VotingConfig,
)
from pixelis.config.learner import LearnerConfig
from pixelis.config.load import find, load, parse
from pixelis.config.memory import MemoryConfig
from pixelis.config.policy import LoraConfig, PolicyConfig
from pixelis.config.presets.algorithms import Algorithm
from pixelis.config.quickstart import QuickstartConfig
from pixelis.config.ranks import RanksConfig
from pixelis.config.refinement import RefinementConfig
from pixelis.config.rewards import (
    CuriosityConfig,
    CurriculumConfig,
    JudgeConfig,
    NormaliseConfig,
    OverlongConfig,
    RewardsConfig,
    RewardWeightsConfig,
    TaskRewardsConfig,
    VoteRewardConfig,
)
from pixelis.config.rft import (
    AdvantageConfig,
    CriticConfig,
    GroupFilterConfig,
    LossConfig,
    ReplayConfig,
    RftConfig,
)
from pixelis.config.root import VLLM_LORA_RANKS, Config, absolute
from pixelis.config.run import RunConfig
from pixelis.config.serve import ServeConfig
from pixelis.config.sft import PartWeightsConfig, SftConfig, SftCurriculumConfig, StageConfig
from pixelis.config.synthesis import SynthesisConfig
from pixelis.config.telemetry import TelemetryConfig
from pixelis.config.toolbox import ToolboxConfig
from pixelis.config.ttrl import TtrlConfig

__all__ = [
    "VLLM_LORA_RANKS",
    "AdvantageConfig",
    "AlertsConfig",
    "Algorithm",
    "AuditConfig",
    "CanaryConfig",
    "ClusterConfig",
    "Config",
    "CriticConfig",
    "CuriosityConfig",
    "CurriculumConfig",
    "DataConfig",
    "DialogueConfig",
    "EngineConfig",
    "EvaluateConfig",
    "EvolutionConfig",
    "GroupFilterConfig",
    "GuardConfig",
    "JudgeConfig",
    "LearnerConfig",
    "LoraConfig",
    "LossConfig",
    "MemoryConfig",
    "NeighboursConfig",
    "NormaliseConfig",
    "OverlongConfig",
    "PartWeightsConfig",
    "PixelRangeConfig",
    "PolicyConfig",
    "QuickstartConfig",
    "RanksConfig",
    "RefinementConfig",
    "ReplayConfig",
    "ReviewConfig",
    "RewardWeightsConfig",
    "RewardsConfig",
    "RftConfig",
    "RunConfig",
    "SamplingConfig",
    "Section",
    "ServeConfig",
    "SftConfig",
    "SftCurriculumConfig",
    "StageConfig",
    "SynthesisConfig",
    "TaskRewardsConfig",
    "TelemetryConfig",
    "ThresholdConfig",
    "ToolboxConfig",
    "TtrlConfig",
    "VoteRewardConfig",
    "VotingConfig",
    "absolute",
    "find",
    "from_command_line",
    "load",
    "parse",
]
