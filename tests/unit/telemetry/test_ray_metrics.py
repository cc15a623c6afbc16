"""Ray metrics: names and values."""

from __future__ import annotations

from pixelis.telemetry import metrics


def test_metric_names_are_valid_in_prometheus():
    assert metrics.metric_name("reward/accuracy") == "pixelis_reward_accuracy"
    assert metrics.metric_name("rollout/tokens_per_s") == "pixelis_rollout_tokens_per_s"
    assert metrics.metric_name("Tool: zoom-in/µs!") == "pixelis_tool_zoom_in_s"
