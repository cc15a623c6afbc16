"""Typed configuration: one YAML file, dotted overrides on the command line, nothing else.

``python -m pixelis.jobs.rft configs/nano/rft.yaml learner.lr=3e-4 --dry-run`` prints the resolved configuration. A file may
name another with ``extends: other.yaml`` (relative to itself); later values win. Unknown keys, wrong types and
contradictions are errors that name the key's path. The defaults are those of the embedded model on a laptop.
"""

from __future__ import annotations

from pixelis.config.load import describe, from_command_line, load, parse
from pixelis.config.online import Alerts, Audit, Canary, Evolution, Guard, Memory, Neighbours, Review, Serve, Voting
from pixelis.config.parts import (
    Cluster,
    Data,
    Dialogue,
    Engine,
    Evaluate,
    Learner,
    Lora,
    PixelRange,
    Policy,
    Quickstart,
    Run,
    Sampling,
    Telemetry,
    Toolbox,
)
from pixelis.config.presets.algorithms import Algorithm
from pixelis.config.ranks import Ranks
from pixelis.config.refinement import Refinement
from pixelis.config.rewards import (
    Curiosity,
    Curriculum,
    Dynamics,
    Judge,
    MathScorer,
    Normalise,
    Overlong,
    Rewards,
    RewardWeights,
    TaskRewards,
    VoteReward,
)
from pixelis.config.rft import Advantage, GroupFilter, Loss, Replay, Rft
from pixelis.config.section import Section
from pixelis.config.sft import PartWeights, Sft, SftCurriculum, Stage
from pixelis.config.synthesis import Synthesis
from pixelis.config.ttrl import Ttrl
from pixelis.config.whole import VLLM_LORA_RANKS, Config, absolute

__all__ = [
    "VLLM_LORA_RANKS",
    "Advantage",
    "Alerts",
    "Algorithm",
    "Audit",
    "Canary",
    "Cluster",
    "Config",
    "Curiosity",
    "Curriculum",
    "Data",
    "Dialogue",
    "Dynamics",
    "Engine",
    "Evaluate",
    "Evolution",
    "GroupFilter",
    "Guard",
    "Judge",
    "Learner",
    "Lora",
    "Loss",
    "MathScorer",
    "Memory",
    "Neighbours",
    "Normalise",
    "Overlong",
    "PartWeights",
    "PixelRange",
    "Policy",
    "Quickstart",
    "Ranks",
    "Refinement",
    "Replay",
    "Review",
    "RewardWeights",
    "Rewards",
    "Rft",
    "Run",
    "Sampling",
    "Section",
    "Serve",
    "Sft",
    "SftCurriculum",
    "Stage",
    "Synthesis",
    "TaskRewards",
    "Telemetry",
    "Toolbox",
    "Ttrl",
    "VoteReward",
    "Voting",
    "absolute",
    "describe",
    "from_command_line",
    "load",
    "parse",
]
