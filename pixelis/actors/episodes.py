"""Episodes whose agent owns the loop: each of its requests lets the policy's episode go on where it stopped.

The record is the one of our own loop (`dialogue.agent`), which a generator interrupts and resumes: tokens,
log-probs, masks and views are what the policy saw and sampled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal

import ray

from pixelis.actors.generator_router import GeneratorRouter, Reservation, TextUpdate
from pixelis.actors.group_views import GroupViews
from pixelis.actors.rollout_messages import EpisodeSoFar, RolloutRequest, RolloutResult
from pixelis.config import Config
from pixelis.dialogue.session import SamplingParams
from pixelis.errors import BadInput
from pixelis.protocol.branches import Branches
from pixelis.protocol.completion import Completion
from pixelis.protocol.errors import ApiError
from pixelis.records import Question, StopReason, Trajectory, new_id

MAX_EPISODES = 10_000
"""Open episodes of a host."""
