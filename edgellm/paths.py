"""Where edgellm keeps things: one function a kind of file, all under EDGELLM_HOME when it is set.

Nothing here creates a folder; whoever writes a file does.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

import platformdirs

_APP: Final = "edgellm"
_PACKAGE: Final = Path(__file__).parent


def expand(text: str) -> Path:
    """``text`` with a leading ``~`` replaced; as it is, like in a shell, when nobody is called so.

    Path.expanduser raises RuntimeError there, and for a user without a home.
    """
    return Path(os.path.expanduser(text))


def exists(path: Path) -> bool:
    """Whether something is there. False, too, for a name too long to be there; raises OSError when
    that cannot be said, as in a folder that may not be read."""
    try:
        return path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def home() -> Path | None:
    """EDGELLM_HOME as a path, or None when every folder follows the system's own rules."""
    value = os.environ.get("EDGELLM_HOME")
    return expand(value) if value else None


def _folder(kind: str, system_folder: str) -> Path:
    root = home()
    return root / kind if root is not None else Path(system_folder)


def store_dir() -> Path:
    """Models that edgellm downloaded or imported."""
    return _folder("models", os.path.join(platformdirs.user_data_dir(_APP, False), "models"))


def cache_dir() -> Path:
    """What can be made again: remote headers, token tables, measured overheads."""
    return _folder("cache", platformdirs.user_cache_dir(_APP, False))


def config_dir() -> Path:
    """config.toml and the person's own profiles."""
    return _folder("config", platformdirs.user_config_dir(_APP, False))


def config_file() -> Path:
    """config.toml, or the file that EDGELLM_CONFIG names."""
    named = os.environ.get("EDGELLM_CONFIG")
    return expand(named) if named else config_dir() / "config.toml"


def state_dir() -> Path:
    """What grows with use: chat history, the archive of benchmark runs, logs."""
    return _folder("state", platformdirs.user_state_dir(_APP, False))


def runtime_dir() -> Path:
    """What lives as long as a process: pid files and addresses of running servers.

    The session's own folder where the system gives one (XDG_RUNTIME_DIR), else below the state: a
    shared folder such as /tmp is open to others' files of the same name.
    """
    session = os.environ.get("XDG_RUNTIME_DIR")
    if home() is None and session and Path(session).is_dir():
        return Path(session) / _APP
    return _folder("run", str(state_dir() / "run"))


def profile_dirs() -> tuple[Path, ...]:
    """Folders with profiles, the person's own first."""
    return config_dir() / "profiles", shipped("profiles")


def shipped(kind: str) -> Path:
    """A folder that comes with edgellm (``profiles``, ``models``): in the wheel or the checkout."""
    inside = _PACKAGE / kind
    return inside if inside.is_dir() else _PACKAGE.parent / kind
