"""What a run tells about itself: events, progress, metrics, and a report with pictures."""
