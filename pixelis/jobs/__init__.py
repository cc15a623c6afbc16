"""What a user starts: one module a job, each runnable by `python -m` and by `ray job submit`."""

import os

# Ray reads it when it is imported. It prints this warning of every node on the driver's output, whatever
# `log_to_driver` is: a job starts many actors at once.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker processes have been started on node")
