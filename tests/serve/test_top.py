"""`pixelis top` on a running service."""

from __future__ import annotations

import pytest
from rich.console import Console
from scripted import KEY, Deployed, picture_url

from pixelis.errors import BadConfig
from pixelis.jobs import top

pytestmark = pytest.mark.slow


def test_a_service_is_drawn(
    deployed: Deployed, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with deployed.client() as client:
        client.post("/v1/agent", json={"question": "say 7,7,7,8", "image": picture_url()})
    monkeypatch.setenv("PIXELIS_API_KEY", KEY)
    service = top.Service(deployed.url)
    console = Console(width=100)
    for _ in range(2):  # a rate needs two samples
        console.print(service.draw())
    shown = capsys.readouterr().out
    for text in ("2 generators", "experiences", "a second", "updates", "confident enough to learn from"):
        assert text in shown
    monkeypatch.setenv("PIXELIS_API_KEY", "wrong")
    with pytest.raises(BadConfig, match="refuses the key"):
        top.Service(deployed.url).draw()
