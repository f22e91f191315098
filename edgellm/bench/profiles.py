"""Profiles that tuning wrote: with reasons inside, and every earlier text kept for going back."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from edgellm import config
from edgellm.bench.archive import Archive
from edgellm.errors import ConfigError
from edgellm.paths import config_dir


def profile_path(name: str) -> Path:
    """Where a person's own profile of that name stands."""
    return config_dir() / "profiles" / f"{name}.toml"


def profile_name(model: str, card: str | None) -> str:
    """``tuned-<model>-<card>``: the card's UUID shortened to what tells cards apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", Path(model).stem.lower()).strip("-")[:48]
    short = re.sub(r"[^a-z0-9]", "", (card or "cpu").lower().removeprefix("gpu-"))[:8]
    return f"tuned-{slug}-{short}"


def profile_text(
    title: str, what_for: str, values: Mapping[str, Any], reasons: Mapping[str, str]
) -> str:
    """A profile file: each value beside why it has it."""
    why = {key: reasons.get(key, "measured") for key in values}
    return config.profile_text(title, what_for, values, why)


def write_profile(archive: Archive, name: str, text: str) -> Path:
    """Write a profile and keep what stood there before."""
    path = profile_path(name)
    previous = path.read_text(encoding="utf-8") if path.is_file() else None
    with archive.open() as db:
        db.execute(
            "INSERT INTO profiles (at, name, text, previous) VALUES (?, ?, ?, ?)",
            (_now(), name, text, previous),
        )
        # Within the transaction: what could not be written is not remembered as written.
        _replace(path, text)
    return path


class Undone(NamedTuple):
    """What a rollback did."""

    name: str
    path: Path
    is_there: bool
    """Whether the profile still exists: False when there was none before."""
    kept: Path | None = None
    """Where a text that is not tuning's own was put: a person had changed the file."""


def rollback(archive: Archive, name: str | None = None) -> Undone:
    """Undo the newest write of a profile (the newest of all, without a name).

    Raises ConfigError when nothing was written.
    """
    with archive.open() as db:
        row = db.execute(
            "SELECT id, name, text, previous FROM profiles WHERE ?1 IS NULL OR name = ?1"
            " ORDER BY id DESC LIMIT 1",
            (name,),
        ).fetchone()
        if row is None:
            which = f"profile {name}" if name else "any profile"
            raise ConfigError(f"tuning has not written {which}", hint="edgellm tune MODEL")
        number, found, text, previous = row
        db.execute("DELETE FROM profiles WHERE id = ?", (number,))
        path = profile_path(str(found))
        kept = _keep_edited(path, str(text))
        if previous is None:
            path.unlink(missing_ok=True)
        else:
            _replace(path, str(previous))
    return Undone(str(found), path, previous is not None, kept)


def _keep_edited(path: Path, written: str) -> Path | None:
    if not path.is_file() or path.read_text(encoding="utf-8") == written:
        return None
    aside = path.with_suffix(".toml.edited")
    path.replace(aside)
    return aside


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".toml.part")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
