"""Asks a running service questions of a data set, with patience while it is busy or restarts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx

from pixelis.config import ToolboxConfig
from pixelis.datasets.agent_request import agent_request
from pixelis.dialogue.session import BATCH_PRIORITY
from pixelis.errors import BadConfig, BadInput, InfraFailure
from pixelis.records import Question

PATIENCE_S = 600.0
"""Seconds for which a question is asked again while the service is busy or away."""
MAX_PAUSE_S = 30.0
FIELDS = ("answer", "confidence", "verdict", "policy_version")


class RemoteAgent:
    """The ``/v1/agent`` of the service at ``url``, behind its callers; nothing is stored or learnt."""

    def __init__(
        self, url: str, key: str, caps: ToolboxConfig, timeout_s: float, patience_s: float = PATIENCE_S
    ):
        self.caps, self.patience_s = caps, patience_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = url.rstrip("/").removesuffix("/v1")
        if not base.startswith(("http://", "https://")):
            raise BadConfig(f"{url!r} is no address of a service", fix="--url http://localhost:8000")
        self.client = httpx.AsyncClient(base_url=base, headers=headers, timeout=2 * timeout_s + 10.0)

    async def __aenter__(self) -> RemoteAgent:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.aclose()

    async def answer(self, question: Question) -> dict[str, Any]:
        """The fields of a line of answers. BadInput for a refused question, InfraFailure without an answer."""
        body = await asyncio.to_thread(agent_request, question, self.caps)
        reply = await self._post({**body, "priority": BATCH_PRIORITY, "learn": False, "remember": False})
        trajectory = reply["trajectory"]
        for image in trajectory["images"]:
            image["uri"] = ""  # a line has no pictures
        return {**{name: reply[name] for name in FIELDS}, "trajectory": trajectory, "error": None}

    async def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        deadline, pause_s = time.monotonic() + self.patience_s, 1.0
        while True:
            try:
                reply = await self.client.post("/v1/agent", json=body)
                problem, code = f"status {reply.status_code}", reply.status_code
            except httpx.HTTPError as error:
                problem, code, reply = type(error).__name__, 0, None
            if reply is not None and code == 200:
                return dict(reply.json())
            if reply is not None and code not in (408, 429) and code < 500:
                try:
                    refusal = reply.json()["error"]
                    name, message = str(refusal["code"]), str(refusal["message"])
                except (ValueError, KeyError, TypeError):
                    name, message = "not_a_service", f"{reply.url} answers with status {code}"
                if code in (401, 403, 404, 405) or name == "not_a_service":  # not this question alone
                    raise InfraFailure(
                        f"the service refuses to answer: {message}",
                        code=name,
                        fix="check --url and PIXELIS_API_KEY",
                    )
                raise BadInput(message, code=name)
            if time.monotonic() + pause_s > deadline:
                message = f"{self.client.base_url} did not answer for {self.patience_s:g} s ({problem})"
                raise InfraFailure(
                    message, fix="look at its /healthz; repeat the command, it goes on where it ended"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
