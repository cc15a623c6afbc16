"""The Ray Serve application: a gateway with OpenAI's API, its agent, and the work after a reply."""

import os

# Ray Serve's controller, proxies and replicas read these when they start. They inherit them from the process that
# starts Ray with this room loaded (`pixelis serve`, `serve run`); `actors.cluster.connect` gives them to workers.
# It kills a proxy that is not ready in 5 s, which is little for a busy machine, and the start fails with it.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
# It takes three failed checks to notice that a proxy is dead: 30 s by default.
os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S", "2")
# The gateway never blocks its event loop: one of its own beside the server's would cost a request two
# hand-overs between threads.
os.environ.setdefault("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")
