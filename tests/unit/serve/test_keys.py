"""API keys: the file of `pixelis keys`, scopes, and what a gateway accepts while the file changes."""

from __future__ import annotations

import json
import re
import stat
import sys
import threading
from pathlib import Path
from typing import cast

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from gateways import client, state_of

from pixelis.config import load
from pixelis.errors import BadConfig
from pixelis.jobs import keys as job
from pixelis.records import Experience, Group, Neighbour, Question, Trajectory, Verdict, Vote
from pixelis.serve import app, keys
from pixelis.serve.agent_types import Answer
from pixelis.serve.keys import Caller, KeyFile, Keys, digest
from pixelis.serve.request_handler import shown_to, verdict_for
from pixelis.serve.state import CLIENT_UPLOADS


@pytest.fixture(autouse=True)
def _follow_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = Keys._follow
    monkeypatch.setattr(Keys, "_follow", lambda self, age_s=0.0: follow(self, 0.0))


def order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["pixelis keys", *map(str, words)])
    job.main()
    return capsys.readouterr().out.strip()


def test_a_key_is_created_listed_and_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = order(monkeypatch, capsys, "create", tmp_path, "shop", "--scopes", "ask,users")
    file = tmp_path / "keys.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key not in file.read_text()
    (listed,) = json.loads(order(monkeypatch, capsys, "list", tmp_path, "--json"))
    assert (listed["name"], listed["scopes"], listed["revoked_at"]) == ("shop", ["ask", "users"], None)
    assert "digest" not in listed
    accepted = Keys(file, None, "X")
    caller = accepted.caller(digest(key))
    assert (caller.label, caller.scopes) == ("key shop", {"ask", "users"})
    order(monkeypatch, capsys, "revoke", tmp_path, "shop")
    assert accepted.caller(digest(key)) is None
    assert "revoked" in order(monkeypatch, capsys, "list", tmp_path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "words",
    [
        ["create", "DIR", "shop"],
        ["create", "DIR", "../etc"],
        ["create", "DIR", "other", "--scopes", "everything"],
        ["revoke", "DIR", "nobody"],
        ["destroy", "DIR"],
        [],
    ],
)
def test_a_wrong_order_changes_nothing_and_exits_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    KeyFile(tmp_path / "keys.json").create("shop", ["ask"])
    before = (tmp_path / "keys.json").read_bytes()
    with pytest.raises(SystemExit) as ended:
        order(monkeypatch, capsys, *(str(tmp_path) if word == "DIR" else word for word in words))
    assert ended.value.code == 2
    assert "fix:" in capsys.readouterr().err
    assert (tmp_path / "keys.json").read_bytes() == before


def test_keys_created_at_once_are_all_kept(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=KeyFile(tmp_path / "k.json").create, args=(f"k{i}", ["ask"]))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.name for key in KeyFile(tmp_path / "k.json").entries()) == [f"k{i}" for i in range(8)]


def test_a_key_is_required_once_there_is_one_and_still_when_the_file_vanishes(tmp_path: Path) -> None:
    accepted = Keys(tmp_path / "keys.json", None, "X")
    assert not accepted.required
    assert accepted.caller(digest("")) == Caller()
    key = KeyFile(accepted.path).create("shop", ["ask"])
    assert accepted.required
    assert accepted.caller(digest("")) is None
    assert accepted.caller(digest(key)) is not None
    accepted.path.write_text("{")
    assert accepted.caller(digest(key)) is None
    accepted.path.unlink()
    assert accepted.caller(digest(key)) is None
    assert accepted.caller(digest("")) is None


def test_the_environments_key_has_every_scope_beside_the_file(tmp_path: Path) -> None:
    accepted = Keys(tmp_path / "keys.json", digest("secret"), "PIXELIS_API_KEY")
    key = KeyFile(accepted.path).create("shop", ["ask"])
    caller = accepted.caller(digest("secret"))
    assert (caller.label, caller.scopes) == ("key PIXELIS_API_KEY", frozenset(keys.SCOPES))
    shop = accepted.caller(digest(key))
    assert shop.scopes == {"ask"}
    assert accepted.caller(digest("other")) is None


def test_a_file_of_version_0_1_0_is_read(tmp_path: Path) -> None:
    entry = {"name": "shop", "digest": "0" * 64, "scopes": ["ask"], "per_minute": 3, "created_at": 1.0}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    assert [key.name for key in KeyFile(tmp_path / "keys.json").entries()] == ["shop"]


def test_a_file_of_keys_is_enough_off_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIXELIS_API_KEY", raising=False)
    config = load(None, ["serve.host=0.0.0.0", f"run.dir={tmp_path}"])
    with pytest.raises(BadConfig, match="pixelis keys"):
        app.api_key_digest(config)
    KeyFile(tmp_path / "keys.json").create("shop", ["ask"])
    required = app.api_key_digest(config)
    assert required is not None
    assert Keys(tmp_path / "gone.json", required, "X").caller(digest("")) is None


def test_a_key_owns_what_it_asked_and_is_one_user_without_the_scope_users() -> None:
    shop, bank, root = Caller(name="shop", scopes=frozenset({"ask"})), Caller(name="bank"), Caller()
    for owner in (shop.owner("anna"), shop.owner(None)):
        assert shop.may_see(owner)
        assert not bank.owns(owner)
        assert not root.owns(owner)
        assert root.may_see(owner)
    assert not shop.may_see(bank.owner("anna"))
    assert not shop.may_see(root.owner("anna"))
    assert not shop.may_see(None)
    assert shop.voter("anna") == shop.voter("bob") == shop.voter(None) != ""
    voters = [bank.voter("anna"), bank.voter("bob"), bank.voter(None), root.voter("anna"), shop.voter("anna")]
    assert len(set(voters)) == 5
    assert root.voter(None) == ""


@pytest.mark.parametrize(
    "path", ["/v1/agent", "/v1/chat/completions", "/v1/responses", "/v1/experiences/search", "/v1/files"]
)
def test_a_refusal_for_want_of_room_costs_nothing_and_one_for_its_rate_is_counted(
    path: str, tmp_path: Path
) -> None:
    key = KeyFile(tmp_path / "keys.json").create("shop", ["ask"])
    gateway = client(f"run.dir={tmp_path}", "serve.per_minute=1", key=key)
    state = state_of(gateway)
    state.admission.inside = 10**6
    assert gateway.post(path, json={}).json()["error"]["code"] == "overloaded"
    state.admission.inside = 0
    assert gateway.post(path, json={}).status_code in (400, 415)
    assert gateway.post(path, json={}).json()["error"]["code"] == "rate_limit_exceeded"
    counted = state.counters.text().decode()
    assert 'pixelis_rate_limited_total{replica="0"} 1.0' in counted
    assert 'pixelis_shed_total{replica="0"} 1.0' in counted


ROUTES: list[tuple[str, str, list[keys.Scope]]] = [
    ("POST", "/v1/agent", ["ask"]),
    ("POST", "/v1/chat/completions", ["ask"]),
    ("POST", "/v1/feedback", ["feedback"]),
    ("POST", "/v1/episodes", ["ask"]),
    ("POST", "/v1/episodes/ep_1/v1/chat/completions", ["ask"]),
    ("POST", "/v1/episodes/ep_1/reward", ["feedback"]),
    ("GET", "/v1/episodes/ep_1", ["ask"]),
    *(("POST", f"/v1/evolution/{order}", ["steer"]) for order in ("pause", "resume", "promote", "rollback")),  # type: ignore[misc]
    ("POST", "/v1/review/t", ["steer"]),
    ("GET", "/v1/review/t", ["steer"]),
    ("GET", "/v1/review", ["steer"]),
    ("GET", "/v1/evolution", ["steer", "read"]),
    ("GET", "/metrics", ["steer", "read"]),
]


def test_a_route_is_refused_without_its_scope(tmp_path: Path) -> None:
    file, gateway = KeyFile(tmp_path / "keys.json"), client(f"run.dir={tmp_path}")
    by_scope = {scope: file.create(f"with-{scope}", [scope]) for scope in keys.SCOPES}
    for method, path, needed in ROUTES:
        for scope, key in [*by_scope.items(), (None, "pxl_other")]:
            headers = {"Authorization": f"Bearer {key}"}
            reply = gateway.request(method, path, json={} if method == "POST" else None, headers=headers)
            refusal = {401: "invalid_api_key", 403: "missing_scope"}.get(reply.status_code)
            expected = None if scope in needed else "missing_scope" if scope else "invalid_api_key"
            assert refusal == expected, (method, path, scope)
            assert refusal is None or reply.json()["error"]["code"] == refusal


def test_the_slow_bodies_of_a_key_keep_no_other_key_out(tmp_path: Path) -> None:
    """All callers have one address here, as behind a proxy."""
    file, gateway = KeyFile(tmp_path / "keys.json"), client(f"run.dir={tmp_path}")
    secret = {name: file.create(name, ["ask", "feedback"]) for name in ("slow", "quick")}
    state_of(gateway).uploads.clients["slow"] = CLIENT_UPLOADS

    def status(name: str) -> int:
        headers = {"Authorization": f"Bearer {secret[name]}"}
        return gateway.post("/v1/agent", headers=headers, json={}).status_code

    assert (status("slow"), status("quick")) == (429, 400)


def test_every_route_but_health_requires_the_key_and_no_form_of_another_page() -> None:
    gateway = client(required="secret", key="")
    routes = [route for route in cast(FastAPI, gateway.app).routes if isinstance(route, APIRoute)]
    assert len(routes) > 20
    for route in routes:
        for method in route.methods:
            path, post = re.sub(r"\{.*?\}", "a", route.path), method == "POST"
            reply = gateway.request(method, path, json={} if post else None)
            assert (reply.status_code == 401) == (path != "/healthz"), (method, path)
            if post:
                headers = {"Authorization": "Bearer secret", "Content-Type": "text/plain"}
                assert gateway.post(path, content=b"{}", headers=headers).status_code == 415, path


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic secret", "Bearer secretx", b"Bearer \xff\xfe", "secret"]
)
def test_what_is_not_exactly_the_key_is_refused(header: str | bytes) -> None:
    gateway = client(required="secret")
    assert gateway.get("/v1/models").status_code == 200
    assert gateway.get("/v1/models", headers={b"Authorization": header}).status_code == 401


def test_a_verdict_shows_nothing_of_another_keys_experience() -> None:
    shop = Caller(name="shop", scopes=frozenset({"ask"}))
    reader = Caller(name="reader", scopes=frozenset({"read"}))
    question = Question(id="q", question="which?", task="serve", split="serve")
    winner = Trajectory(id="t", question_id="q", group_id="g")
    neighbours, votes = [], [Vote(answer="4", id="t")]
    owners = {"own": (shop.owner("anna"), "4"), "other": (Caller(name="bank").owner("anna"), "secret")}
    made = {"question": question, "trajectory": winner, "policy_version": 1, "created_at": 1.0}
    for id, (owner, text) in owners.items():
        verdict = Verdict(answer=text, confidence=1.0, strategy="weighted")
        experience = Experience(id=id, verdict=verdict, user=owner, **made)
        neighbours.append(Neighbour(experience=experience, similarity=0.9))
        votes.append(Vote(answer=text, source="neighbour", id=id, weight=0.5))
    verdict = Verdict(
        answer="4",
        confidence=0.7,
        strategy="ensemble",
        votes=votes,
        answer_weights={"4": 1.5, "secret": 0.5},
        strategies={"majority": "secret"},
    )
    group = Group(id="g", question=question, trajectories=[winner])
    answer = Answer(verdict, group, winner, None, neighbours=neighbours)
    shown = shown_to(shop, answer).verdict
    assert "secret" not in shown.model_dump_json()
    expected = [("t", "4", 1.0), ("own", "4", 0.5), ("", None, 0.5)]
    assert [(v.id, v.answer, v.weight) for v in shown.votes] == expected
    assert (shown.answer, shown.confidence) == ("4", 0.7)
    assert answer.verdict.votes[2].answer == "secret"
    assert shown_to(reader, answer) is answer
    assert shown_to(Caller(), answer) is answer
    stored = verdict_for(shop, verdict)  # whose neighbours have no owners
    assert "secret" not in stored.model_dump_json()
    assert [v.answer for v in stored.votes] == ["4", None, None]
    assert verdict_for(reader, verdict) == verdict
