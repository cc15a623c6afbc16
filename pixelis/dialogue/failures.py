"""Why no sample of a question was completed."""

from __future__ import annotations

from collections.abc import Sequence

from pixelis.errors import BadInput, InfraFailure
from pixelis.records import StopReason, Trajectory


def require_completed(samples: Sequence[Trajectory]) -> None:
    """Raise BadInput if the prompt fits no sample, or the policy cannot read it; InfraFailure if all failed."""
    if all(t.stop_reason is StopReason.OVER_CONTEXT and not t.policy_turns for t in samples):
        message = "the question and its pictures do not fit the model's context"
        raise BadInput(message, code="context_length_exceeded")
    if not all(t.stop_reason in (StopReason.ERROR, StopReason.DEADLINE) for t in samples):
        return
    causes = {t.unscored for t in samples}
    if "bad_answer" in causes:
        message = f"an earlier answer cannot be written in the policy's dialect, {samples[0].dialect}"
        raise BadInput(message, code="unsupported_conversation")
    if "no_vision" in causes:
        raise BadInput("the policy reads text alone", code="no_vision")
    reasons = ", ".join(sorted(filter(None, causes)))
    raise InfraFailure(f"all samples failed: {reasons}", code="samples_failed")
