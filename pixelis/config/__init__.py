"""Typed configuration: a YAML file, the files it extends, and dotted overrides on the command line.

``pixelis rft configs/nano/rft.yaml learner.lr=3e-4 --dry-run`` prints the resolved configuration. Unknown
keys, wrong types and contradictions are errors that name the key. The defaults suit the embedded model on a
laptop.
"""

from __future__ import annotations

from pixelis.config.command_line import from_command_line
from pixelis.config.data import DataConfig
from pixelis.config.dialogue import DialogueConfig, PixelRangeConfig
from pixelis.config.engine import EngineConfig
from pixelis.config.evolution import (
    AlertsConfig,
    AuditConfig,
    CanaryConfig,
    EvolutionConfig,
    GuardConfig,
    ThresholdConfig,
    VotingConfig,
)
from pixelis.config.learner import LearnerConfig
from pixelis.config.load import load, parse
from pixelis.config.memory import MemoryConfig
from pixelis.config.policy import LoraConfig, PolicyConfig
from pixelis.config.presets.algorithms import Algorithm
from pixelis.config.ranks import RanksConfig
from pixelis.config.rewards import (
    CuriosityConfig,
    CurriculumConfig,
    JudgeConfig,
    RewardsConfig,
    RewardWeightsConfig,
    TaskRewardsConfig,
)
from pixelis.config.rft import (
    AdvantageConfig,
    CriticConfig,
    LossConfig,
    ReplayConfig,
    RftConfig,
)
from pixelis.config.root import VLLM_LORA_RANKS, Config, absolute
from pixelis.config.run import RunConfig
from pixelis.config.sft import PartWeightsConfig, SftConfig, SftCurriculumConfig, StageConfig
from pixelis.config.toolbox import ToolboxConfig
from pixelis.config.ttrl import TtrlConfig
