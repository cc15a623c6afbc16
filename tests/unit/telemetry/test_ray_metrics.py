"""Ray metrics: names and values."""

from __future__ import annotations

import sys
import types

import pytest

from pixelis.telemetry import metrics


def test_metric_names_are_valid_in_prometheus():
    assert metrics.metric_name("reward/accuracy") == "pixelis_reward_accuracy"
    assert metrics.metric_name("rollout/tokens_per_s") == "pixelis_rollout_tokens_per_s"
    assert metrics.metric_name("Tool: zoom-in/µs!") == "pixelis_tool_zoom_in_s"


def test_only_finite_numbers_are_published(monkeypatch):
    published = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name, self.tag_keys = name, tag_keys

        def set(self, value, tags):
            published[self.name] = (value, tags, self.tag_keys)

    fake = types.SimpleNamespace(Gauge=Gauge)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=types.SimpleNamespace(metrics=fake)))
    monkeypatch.setitem(sys.modules, "ray.util", types.SimpleNamespace(metrics=fake))
    monkeypatch.setattr(metrics, "_instruments", {})
    values = {
        "reward/accuracy": 0.5,
        "policy/loss": float("nan"),
        "note": "text",
        "flag": True,
        "rollout/n": 3,
    }
    metrics.publish(values, tags={"stage": "rft"})
    assert published == {
        "pixelis_reward_accuracy": (0.5, {"stage": "rft"}, ("stage",)),
        "pixelis_rollout_n": (3.0, {"stage": "rft"}, ("stage",)),
    }


def test_metrics_are_published_to_ray():
    pytest.importorskip("ray")
    metrics.publish({"test/value": 1.5})
    metrics.count("test/things", 2)
    metrics.count("test/things", 0)
