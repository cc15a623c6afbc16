"""What a user starts: one module a job, each runnable by `python -m` and by `ray job submit`."""
