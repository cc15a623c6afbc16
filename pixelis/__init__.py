"""Pixelis: train, serve and evolve vision-language models that reason with pixel operations."""

import os

__version__ = "0.2.0"

# Ray prints this warning of every node on the driver's output, whatever `log_to_driver` is: a job starts many
# actors at once.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "worker processes have been started on node")

# Ray Serve reads these when it is imported, here and in its controller. It kills a proxy that is not ready in
# 5 s, which is little for a busy machine, and the start fails with it.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
# It takes three failed checks to notice that a proxy is dead: 30 s by default.
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2")
# The gateway never blocks its event loop: one of its own beside the server's would cost a request two
# hand-overs between threads.
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
