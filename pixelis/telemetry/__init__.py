"""Telemetry of a run: events, progress, metrics, reports with pictures."""
