"""An agent that plays pairs of episodes until it is killed: rewarding_agent.py URL; a line for each reward.

It sends what is not answered again, as OpenAI's clients do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import httpx

ASK = {"model": "pixelis-nano", "messages": [{"role": "user", "content": "say 7"}]}


def post(client: httpx.Client, url: str, body: dict[str, Any]) -> dict[str, Any]:
    while True:
        try:
            reply = client.post(url, json=body)
            if reply.status_code == 200:
                return reply.json()
            print(json.dumps({"status": reply.status_code, "text": reply.text[:300]}), flush=True)
        except httpx.HTTPError as error:
            print(json.dumps({"error": type(error).__name__}), flush=True)
        time.sleep(0.3)


def main(url: str) -> None:
    with httpx.Client(timeout=20) as client:
        for number in range(10**9):
            group = {"group": f"{os.getpid()}-{number}", "samples": 2, "expires_s": 20}
            episodes = [post(client, f"{url}/v1/episodes", group) for _ in range(2)]
            for reward, episode in enumerate(episodes):
                post(client, f"{episode['base_url']}/chat/completions", ASK)
                post(client, f"{url}/v1/episodes/{episode['id']}/reward", {"reward": reward})
                rewarded = {"episode": episode["id"], "reward": reward, "group": group["group"]}
                print(json.dumps(rewarded), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
