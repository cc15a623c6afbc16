"""API keys with names and scopes: the file that `pixelis keys` manages, and the keys that a gateway accepts.

The file holds SHA-256 digests: a key is 32 random bytes, which nobody can guess.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Literal, get_args

from pydantic import ConfigDict, Field, ValidationError

from pixelis.config import Config
from pixelis.errors import BadConfig
from pixelis.evolution.privacy import pseudonym
from pixelis.files import locked, replacing
from pixelis.records import Record

FILE = "keys.json"
Scope = Literal["ask", "feedback", "steer", "read", "users"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""ask questions; give feedback; steer: promote, roll back, pause, review; read everybody's experiences and
the status; users: the `user` of a request names one of several callers, each with its own share of updates.
"""
NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
CHECK_S = 0.5
"""Age at which a gateway reads the file again."""


class ApiKey(Record):
    """A key as stored; times in seconds since the epoch."""

    model_config = ConfigDict(extra="ignore")  # the rates that version 0.1.0 stored
    name: str = Field(pattern=NAME)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: list[Scope]
    created_at: float
    revoked_at: float | None = None


class Caller(Record):
    """The sender of a request. ``name`` is empty for the key of the environment and without keys."""

    name: str = ""
    label: str = "loopback"
    scopes: frozenset[Scope] = frozenset(SCOPES)

    @property
    def space(self) -> str:
        """Prefix of the stored users of this key."""
        return f"{pseudonym(self.name)}." if self.name else ""

    def owner(self, user: str | None) -> str | None:
        """The pseudonym stored with experiences of this caller's ``user``."""
        return self.space + (pseudonym(user) if user else "") or None

    def voter(self, user: str | None) -> str:
        """The pseudonym whose share of an update is capped: the key's, or its user's with `users`."""
        return (self.owner(user) or "") if "users" in self.scopes else self.space

    def may_see(self, owner: str | None) -> bool:
        return "read" in self.scopes or self.owns(owner)

    def owns(self, owner: str | None) -> bool:
        return (owner or "").startswith(self.space) if self.name else "." not in (owner or "")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def key_file(config: Config) -> Path:
    return Path(config.serve.keys or Path(config.run.dir) / FILE)


class KeyFile:
    """The file of keys. Methods raise BadConfig when it is damaged."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lock = self.path.with_name(f".{self.path.name}.lock")

    def entries(self) -> list[ApiKey]:
        """All keys, revoked ones too."""
        try:
            rows = json.loads(self.path.read_bytes())
            return [ApiKey.model_validate(row) for row in rows["keys"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise BadConfig(
                f"{self.path} cannot be read: {error}",
                fix="restore it, or move it away and create the keys again",
            ) from None

    def create(self, name: str, scopes: list[Scope]) -> str:
        """Store and return a new key; it sees the experiences of a revoked one of its name.

        Raises BadConfig for a name in use.
        """
        key = f"pxl_{secrets.token_urlsafe(32)}"
        try:
            entry = ApiKey(name=name, digest=digest(key).hex(), scopes=scopes, created_at=time.time())
        except ValidationError:
            raise BadConfig(
                f"{name!r:.80} is no name of a key",
                fix="up to 64 letters, digits, dots, dashes or underscores",
            ) from None
        with locked(self.lock):
            keys = self.entries()
            if any(k.name == name and k.revoked_at is None for k in keys):
                raise BadConfig(
                    f"there is a key {name} already", fix="revoke it first, or choose another name"
                )
            self._write([*keys, entry])
        return key

    def revoke(self, name: str) -> None:
        """Refuse the key from now on. Raises BadConfig if no such key is valid."""
        with locked(self.lock):
            keys = self.entries()
            if not any(k.name == name and k.revoked_at is None for k in keys):
                raise BadConfig(f"no valid key {name}", fix="pixelis keys list RUN_DIR")
            revoked = {"revoked_at": time.time()}
            self._write(
                [k.model_copy(update=revoked) if k.name == name and k.revoked_at is None else k for k in keys]
            )

    def _write(self, keys: list[ApiKey]) -> None:
        with replacing(self.path, "w", permissions=0o600) as file:
            json.dump({"keys": [k.model_dump(mode="json") for k in keys]}, file, indent=1)


class Keys:
    """The keys that a gateway accepts: that of the environment ``variable``, and those of a file.

    ``environment`` is the digest of the former; None without one, b"" if a key is required all the same.
    """

    def __init__(self, path: Path, environment: bytes | None, variable: str):
        self.path, self.environment, self.variable = path, environment, variable
        self._checked = float("-inf")
        self._callers: dict[bytes, Caller] = {}
        self._strict = environment is not None

    @property
    def required(self) -> bool:
        self._follow()
        return self._strict

    def caller(self, presented: bytes) -> Caller | None:
        self._follow()
        if not self._strict:
            return Caller()
        if self.environment and secrets.compare_digest(presented, self.environment):
            return Caller(label=f"key {self.variable}")
        if presented not in self._callers:  # it may have been created just now
            self._follow(0.0)
        return self._callers.get(presented)

    def _follow(self, age_s: float = CHECK_S) -> None:
        """Read the file again. A damaged or missing file has no valid keys."""
        if time.monotonic() - self._checked < age_s:
            return
        self._checked = time.monotonic()
        try:
            keys = KeyFile(self.path).entries()
        except BadConfig:
            self._strict, self._callers = True, {}
            return
        self._strict = self._strict or bool(keys)
        self._callers = {
            bytes.fromhex(k.digest): Caller(name=k.name, label=f"key {k.name}", scopes=frozenset(k.scopes))
            for k in keys
            if k.revoked_at is None
        }
