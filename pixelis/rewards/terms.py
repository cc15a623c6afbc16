"""Reward terms of a group of rollouts and their weighted sum; ``unscored`` if a term cannot be computed."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pixelis.config import RewardsConfig
from pixelis.errors import DataFailure, OperationError, PixelisError
from pixelis.operations.geometry import place_of
from pixelis.records import Group, Question, StopReason, Trajectory, Turn
from pixelis.rewards import coherence as sequences
from pixelis.rewards.equality import Equality, classes, spellings
from pixelis.rewards.extraction import answers_of
from pixelis.rewards.formats import FORMATS, PUNISHING, completion, has_box
from pixelis.rewards.scorers import GRADED, LOWEST, SCORERS, SLOW, box_iou, case_of, exact, find_scorer
from pixelis.rewards.services import OVERALL, Services, finite, shared_services

if TYPE_CHECKING:
    from pixelis.rewards.dynamics import Dynamics, States

log = logging.getLogger(__name__)

_MARKERS = re.compile(r"(Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,)")
BROKEN = (StopReason.ERROR, StopReason.DEADLINE)
"""Stop reasons caused by the system: such episodes have no reward and do not count in group statistics."""
UNREADABLE = ("truth_unparsable", "timeout", "out_of_memory", "crashed", "raised")
"""Failures of a scorer that cannot read a truth."""


# Operation calls


def tries_call(turn: Turn) -> bool:
    return turn.is_policy and (turn.action is not None or turn.error not in (None, "bad_token"))


def calls(trajectory: Trajectory, counts: str) -> int:
    """Number of operations ``executed``, or ``requested``, with failed and unreadable calls."""
    if counts == "executed":
        return trajectory.operations_ok
    return sum(max(len(turn.actions), 1) for turn in trajectory.turns if tries_call(turn))


def ends_in_error(trajectory: Trajectory) -> bool:
    for i in reversed(range(len(trajectory.turns))):
        turn = trajectory.turns[i]
        if tries_call(turn):
            last = i + max(len(turn.actions), 1)
            reply = trajectory.turns[last].observation if last < len(trajectory.turns) else None
            return turn.error is not None or (reply is not None and reply.status == "error")
    return False


# Context of a term


@dataclass
class Context:
    """The group of a trajectory and everything else that its terms depend on.

    ``pseudo``: the truths come from a vote. ``mixture`` replaces configured weights; ``normalise`` maps
    (term, raw value) to the value that is weighted.
    """

    group: Group
    settings: RewardsConfig
    services: Services
    truths: Sequence[str]
    step: int = 0
    pseudo: bool = False
    states: Mapping[str, States] = field(default_factory=dict)
    dynamics: Dynamics | None = None
    mixture: Mapping[str, float] = field(default_factory=dict)
    normalise: Callable[[str, float], float] = lambda name, value: value

    @property
    def question(self) -> Question:
        return self.group.question

    @cached_property
    def valid(self) -> list[Trajectory]:
        """Trajectories of the group statistics: those that the system did not end."""
        return [t for t in self.group.trajectories if t.stop_reason not in BROKEN]

    @cached_property
    def rate(self) -> float:
        """RaPR of the group: share of trajectories with at least one operation."""
        counts = self.settings.curiosity.counts
        return sum(calls(t, counts) > 0 for t in self.valid) / len(self.valid) if self.valid else 0.0

    @cached_property
    def own(self) -> dict[str, dict[str, dict[str, float] | DataFailure]]:
        """Values of the user's own functions by name and trajectory."""
        if not self.valid:
            return {}
        ids = [t.id for t in self.valid]
        return {
            name: dict(zip(ids, self.services.own(name, self.valid, self.question, self.step), strict=True))
            for name in self.settings.own
        }

    @cached_property
    def weights(self) -> dict[str, float]:
        task = self.settings.tasks.get(self.question.task)
        return {**(task or self.settings).weights.model_dump(), **self.mixture}

    @cached_property
    def format_kind(self) -> str:
        return (self.settings.tasks.get(self.question.task) or self.settings).format

    @cached_property
    def lengths(self) -> dict[str, int]:
        return {t.id: len(completion(t)) for t in self.valid}

    @cached_property
    def scores(self) -> dict[str, float | DataFailure]:
        if not self.truths:
            return self._fail("the question has no truth", "no_truth")
        return self._grade(self.truths, self.pseudo)

    def _fail(self, message: str, code: str) -> dict[str, float | DataFailure]:
        return dict.fromkeys((t.id for t in self.valid), DataFailure(message, code=code))

    @cached_property
    def agreement(self) -> dict[str, float | DataFailure]:
        """Score of each answer against the majority answer, or the failure; truths are not used."""
        vote, answers = self.settings.vote, [self.answers[t.id] for t in self.valid]
        names = classes(answers, Equality(self.question, self.scorer, self.services))
        votes = Counter(name for name in names if name is not None)
        (winner, most), (_, second) = [*votes.most_common(2), ("", 0), ("", 0)][:2]  # ties: the first voted
        if vote.tie == "abstain" and 0 < most == second:
            return self._fail("the rollouts do not agree", "tie")
        if not most or most < vote.min_share * len(self.valid):
            return self._fail("the rollouts do not agree", "no_majority")
        graded = self.scorer in GRADED
        others = self._grade([spellings(answers, names)[winner]], pseudo=True) if graded else {}
        return {
            t.id: 1.0 if name == winner and not self.discounted(t) else others.get(t.id, 0.0)
            for t, name in zip(self.valid, names, strict=True)
        }

    def score(self, trajectory: Trajectory) -> float:
        return _value_or_raise(self.scores[trajectory.id])

    @cached_property
    def right_without_calls(self) -> bool:
        """Whether a rollout of the group is right and called nothing."""
        direct = (self.scores[t.id] for t in self.valid if not calls(t, "requested"))
        return any(not isinstance(score, DataFailure) and score > 0.5 for score in direct)

    @property
    def scorer(self) -> str:
        return self.settings.scorer_of(self.question.task, self.question.scorer)

    @cached_property
    def answers(self) -> dict[str, str | None]:
        valid = self.group.model_copy(update={"trajectories": self.valid})
        return answers_of([valid], self.settings, self.services)

    def too_long(self, trajectory: Trajectory) -> bool:
        limit = self.settings.max_answer_chars
        return bool(limit) and len(self.answers[trajectory.id] or "") >= limit

    def discounted(self, trajectory: Trajectory) -> bool:
        """True for an answer that scores 0 whatever it says."""
        return self.too_long(trajectory) or (self.format_kind == "boxed_once" and not has_box(trajectory))

    def _grade(self, truths: Sequence[str], pseudo: bool = False) -> dict[str, float | DataFailure]:
        """Score each distinct answer once; ``pseudo``: if the scorer cannot read the truths, equal text scores 1."""
        name, scorer = self.scorer, find_scorer(self.scorer)

        def grade(answer: str | None) -> float | DataFailure:
            try:
                with self.services.timed(name):
                    value = finite(scorer(case_of(self.question, answer, truths), self.services))
            except DataFailure as failure:
                return exact(answer, truths) if pseudo and failure.code in UNREADABLE else failure
            except PixelisError:
                raise
            except Exception as error:  # counted as a cause
                log.exception("scorer %s failed on question %s", name, self.question.id)
                return DataFailure(f"{type(error).__name__}: {error}", code="scorer_failed")
            if isinstance(value, float) and not LOWEST.get(name, 0.0) - 1e-9 <= value <= 1.0 + 1e-9:
                return DataFailure(f"scorer {name} returned {value}", code="out_of_range")
            return value

        answers = list(dict.fromkeys(self.answers[t.id] for t in self.valid if not self.discounted(t)))
        slow = name not in SCORERS or name in SLOW
        run = self.services.threads.map if slow and len(answers) > 1 else map
        scores = dict(zip(answers, run(grade, answers), strict=True))
        return {t.id: 0.0 if self.discounted(t) else scores[self.answers[t.id]] for t in self.valid}


def _value_or_raise(value: float | DataFailure) -> float:
    if isinstance(value, DataFailure):
        raise value
    return value


# Terms


def accuracy(trajectory: Trajectory, context: Context) -> float:
    return context.score(trajectory)


def wrong(trajectory: Trajectory, context: Context) -> float:
    """The score minus 1; together with accuracy, DAPO's +1 and -1."""
    return context.score(trajectory) - 1.0


def well_formed(trajectory: Trajectory, context: Context) -> float:
    """Value of ``rewards.format``; an answer that is too long is badly formed."""
    if context.too_long(trajectory):
        return -1.0 if context.format_kind in PUNISHING else 0.0
    return FORMATS[context.format_kind](trajectory)


def curiosity(trajectory: Trajectory, context: Context) -> float:
    """Bonus plus cost of Pixel-Reasoner."""
    return curiosity_bonus(trajectory, context) + efficiency(trajectory, context)


def curiosity_bonus(trajectory: Trajectory, context: Context) -> float:
    """Bonus of an episode with calls while the group's RaPR is below H (Pixel-Reasoner, arXiv 2505.15966).

    paper: alpha * max(H - RaPR, 0). repo: max(H - RaPR, 0) / k / RaPR * 0.25, k = 2 for pictures, 1.5 for
    videos.
    """
    settings, rate = context.settings.curiosity, context.rate
    if not calls(trajectory, settings.counts):
        return 0.0
    lack = max(settings.target - rate, 0.0)
    if settings.form == "paper":
        return settings.alpha * lack
    video = any(media.kind == "video" for media in context.question.media)
    return lack / (1.5 if video else 2.0) / rate * 0.25 if rate else 0.0


def efficiency(trajectory: Trajectory, context: Context) -> float:
    """beta * min(N - n, 0) for n calls, N of them free or a refined question's reference (Pixel-Reasoner)."""
    settings = context.settings.curiosity
    reference = context.question.meta.get("reference_operations")
    free = max(settings.free_calls, len(reference) if isinstance(reference, list) else 0)
    return settings.beta * min(free - calls(trajectory, settings.counts), 0)


def tool_if_correct(trajectory: Trajectory, context: Context) -> float:
    """1.0 with an executed operation and a score above ``rewards.tool_above`` (DeepEyes, arXiv 2505.14362)."""
    return float(context.score(trajectory) > context.settings.tool_above and trajectory.operations_ok > 0)


def tool_calls_if_correct(trajectory: Trajectory, context: Context) -> float:
    """The executed operations of an answer above ``rewards.tool_above`` (PyVision-RL, arXiv 2602.20739)."""
    return float(trajectory.operations_ok) if context.score(trajectory) > context.settings.tool_above else 0.0


def adaptive_calls(trajectory: Trajectory, context: Context) -> float:
    """The group-aware reward of Chain-of-Focus (AGAR, arXiv 2505.15436): calls only where they pay.

    1 for a right answer, 0.8 for one with a call where another rollout is right without.
    """
    if context.score(trajectory) <= 0.5:
        return 0.0
    return 0.8 if calls(trajectory, "requested") and context.right_without_calls else 1.0


def tool_penalty(trajectory: Trajectory, context: Context) -> float:
    """Minus the score when any call was made (Mini-o3's tool_call_penalty)."""
    return -context.score(trajectory) if calls(trajectory, "requested") else 0.0


def unrepaired_error_zero(trajectory: Trajectory, context: Context) -> float:
    """Minus the score when the last call failed and was not repaired (Pixel-Reasoner's code)."""
    return -max(context.score(trajectory), 0.0) if ends_in_error(trajectory) else 0.0


def overlong(trajectory: Trajectory, context: Context) -> float:
    """0 up to max - buffer generated tokens, then linearly down to -1 at max (DAPO, arXiv 2503.14476)."""
    settings = context.settings.overlong
    tokens = sum(len(turn.tokens) for turn in trajectory.replies)
    return -min(max(tokens - (settings.max_tokens - settings.buffer), 0) / settings.buffer, 1.0)


def length(trajectory: Trajectory, context: Context) -> float:
    """0.5 - (characters - min) / (max - min) in the group, at most 0 when wrong (Kimi k1.5, 2501.12599)."""
    shortest, longest = min(context.lengths.values()), max(context.lengths.values())
    right = context.score(trajectory) > 0.5
    if context.step < context.settings.length_start or shortest == longest:
        return 0.0
    value = 0.5 - (context.lengths[trajectory.id] - shortest) / (longest - shortest)
    return value if right else min(0.0, value)


def step_markers(trajectory: Trajectory, context: Context) -> float:
    """A third for each step marker ("Step 1:", "1.", bullets, "First,"), at most 1 (Reason-RFT)."""
    return min(1.0, len(_MARKERS.findall(completion(trajectory))) / 3)


def majority_vote(trajectory: Trajectory, context: Context) -> float:
    """Score of the answer against the majority answer, without truths (TTRL, arXiv 2504.16084)."""
    return _value_or_raise(context.agreement[trajectory.id])


def coherence(trajectory: Trajectory, context: Context) -> float:
    states = context.states.get(trajectory.id)
    return sequences.coherence(trajectory, states[1:] if states else None)[0]


def curiosity_dynamics(trajectory: Trajectory, context: Context) -> float:
    """Prediction error of the dynamics model (Pixelis)."""
    if context.dynamics is None or trajectory.id not in context.states:
        raise DataFailure("the group has no states", code="no_states")
    return context.dynamics.curiosity(trajectory, context.states[trajectory.id])


def tool_misuse(trajectory: Trajectory, context: Context) -> float:
    """Penalties for misused operations (Pixelis)."""
    return sequences.misuse(sequences.violations(trajectory, context.question))


def causal_use(trajectory: Trajectory, context: Context) -> float:
    """Mean causal use of the calls in nats, each within 0..1, for a score above 0.5 (docs/looking.md)."""
    if context.score(trajectory) <= 0.5:
        return 0.0
    uses = [use for o in trajectory.observations if (use := o.causal_use) is not None]
    if not uses and trajectory.operations_ok:
        raise DataFailure("the calls were not measured", code="no_causal_use")
    return math.fsum(min(max(use, 0.0), 1.0) for use in uses) / max(1, len(uses))


def dual_iou(trajectory: Trajectory, context: Context) -> float:
    """Mean of recall and precision of the viewed regions in IoU, for a score above 0.5 (TreeVGR, arXiv 2507.07999).

    Recall: the mean over annotated regions of the best IoU of a view; precision: over views, of a region.
    """
    notes = context.question.annotations
    if notes is None or not notes.regions:
        raise DataFailure("the question has no annotated regions", code="no_regions")
    if context.score(trajectory) <= 0.5:
        return 0.0
    truths = [(region.media, region.frame, region.box) for region in notes.regions]
    shown = []
    for view in (view for o in trajectory.observations for view in o.images if view.box is not None):
        with contextlib.suppress(OperationError):  # of a picture that was made
            shown.append(place_of(trajectory.images, view.id))
    if not shown:
        return 0.0
    overlaps = [[box_iou(a[2], b[2]) if a[:2] == b[:2] else 0.0 for b in shown] for a in truths]
    recall, precision = map(max, overlaps), map(max, zip(*overlaps, strict=True))
    return 0.5 * (math.fsum(recall) / len(truths) + math.fsum(precision) / len(shown))


def environment(trajectory: Trajectory, context: Context) -> float:
    """Sum of the rewards of the question's environment."""
    rewards = (o.data.get("reward", 0.0) for o in trajectory.observations)
    return math.fsum(rewards) if context.question.environment else 0.0


class Term(NamedTuple):
    value: Callable[[Trajectory, Context], float]
    low: float
    high: float


INFINITE = math.inf
TERMS: dict[str, Term] = {
    "accuracy": Term(accuracy, min(LOWEST.values()), 1.0),
    "wrong": Term(wrong, -1.5, 0.0),
    "format": Term(well_formed, -1.0, 1.0),
    "curiosity": Term(curiosity, -INFINITE, INFINITE),
    "curiosity_bonus": Term(curiosity_bonus, 0.0, INFINITE),
    "efficiency": Term(efficiency, -INFINITE, 0.0),
    "tool_if_correct": Term(tool_if_correct, 0.0, 1.0),
    "tool_calls_if_correct": Term(tool_calls_if_correct, 0.0, INFINITE),
    "adaptive_calls": Term(adaptive_calls, 0.0, 1.0),
    "tool_penalty": Term(tool_penalty, -1.0, 0.5),
    "unrepaired_error_zero": Term(unrepaired_error_zero, -1.0, 0.5),
    "overlong": Term(overlong, -1.0, 0.0),
    "length": Term(length, -0.5, 0.5),
    "step_markers": Term(step_markers, 0.0, 1.0),
    "majority_vote": Term(majority_vote, min(LOWEST.values()), 1.0),
    "coherence": Term(coherence, -1.0, 1.0),
    "curiosity_dynamics": Term(curiosity_dynamics, 0.0, 1.0),
    "tool_misuse": Term(tool_misuse, -INFINITE, 0.0),
    "causal_use": Term(causal_use, 0.0, 1.0),
    "dual_iou": Term(dual_iou, 0.0, 1.0),
    "environment": Term(environment, -INFINITE, INFINITE),
}
"""Terms by their name in ``rewards.weights``."""


# Groups


def score_group(
    group: Group,
    settings: RewardsConfig,
    truths: Sequence[str] | None = None,
    services: Services | None = None,
) -> Group:
    """A copy of a group with ``rewards``, ``weighted``, and ``reward`` or ``unscored`` on each trajectory.

    ``truths`` (a pseudo-label) replaces the question's answers.
    """
    services = services or shared_services(settings)
    if truths is not None:
        return score_in(Context(group, settings, services, truths, pseudo=True))
    return score_in(Context(group, settings, services, group.question.answers or []))


def score_in(context: Context) -> Group:
    find_scorer(context.scorer)
    scored = []
    for trajectory in context.group.trajectories:
        raw: dict[str, float] = {}
        weighted: dict[str, float] = {}
        if trajectory.stop_reason in BROKEN:
            cause: str | None = trajectory.unscored or trajectory.stop_reason.value
        else:
            cause = _measure(trajectory, context, raw, weighted)
        reward, clip = None if cause else math.fsum(weighted.values()), context.settings.clip
        if reward is not None and clip:
            reward = max(-clip, min(clip, reward))
        if reward is not None and not math.isfinite(reward):
            reward, cause = None, "not_finite"
        if cause:
            context.services.note(cause)
            weighted = {}
        values = {
            "rewards": raw,
            "weighted": weighted,
            "reward": reward,
            "unscored": cause,
            "advantage": None,
        }
        scored.append(trajectory.model_copy(update=values))
    return context.group.model_copy(update={"trajectories": scored})


def _measure(
    trajectory: Trajectory, context: Context, raw: dict[str, float], weighted: dict[str, float]
) -> str | None:
    """Fill in raw and weighted terms; returns the cause if a weighted one cannot be computed.

    What an outside agent or a verifier gave is the reward: the run's own terms are for episodes without it.
    """
    if trajectory.outcome is not None:
        raw |= trajectory.outcome
        weighted |= trajectory.outcome
        return None
    cause = None
    for name in context.settings.computed:
        term, weight = TERMS[name], context.weights[name]
        try:
            value = _value_or_raise(finite(term.value(trajectory, context)))
            if not term.low - 1e-9 <= value <= term.high + 1e-9:
                raise DataFailure(f"{name} is {value}", code="out_of_range")
        except DataFailure as failure:
            if weight:
                cause = cause or failure.code
            continue
        raw[name] = value
        if weight:
            weighted[name] = weight * context.normalise(name, value)
    for name, values in context.own.items():
        own_value = values[trajectory.id]
        if isinstance(own_value, DataFailure):
            if context.settings.own[name]:
                cause = cause or f"own_reward:{own_value.code}"
            continue
        raw[name] = own_value[OVERALL]
        raw |= {f"{name}.{key}": value for key, value in own_value.items() if key != OVERALL}
        weighted[name] = context.settings.own[name] * own_value[OVERALL]
    return cause


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Means ``reward/TERM`` and ``reward_weighted/TERM``, shares ``unscored/CAUSE``, counts ``misuse/NAME``."""
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        return {}
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None:
            values.setdefault("reward/total", []).append(trajectory.reward)
        for name, value in trajectory.rewards.items():
            values.setdefault(f"reward/{name}", []).append(value)
        for name, value in trajectory.weighted.items():
            values.setdefault(f"reward_weighted/{name}", []).append(value)
    metrics = {name: math.fsum(terms) / len(terms) for name, terms in values.items()}
    for cause, count in Counter(t.unscored for t in trajectories if t.unscored).items():
        metrics[f"unscored/{cause}"] = count / len(trajectories)
    if "reward/tool_misuse" in metrics:
        found = (sequences.violations(t, g.question) for g in groups for t in g.trajectories)
        violations = sum(found, Counter[str]())
        metrics |= {f"misuse/{name}": float(count) for name, count in violations.items()}
    return metrics
