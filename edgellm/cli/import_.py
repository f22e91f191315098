"""``edgellm import``: use a model file from anywhere on this machine."""

from __future__ import annotations

from pathlib import Path

from edgellm import config, paths
from edgellm.cli.progress import emit, listener
from edgellm.errors import ModelNotFoundError
from edgellm.gguf.reader import check_file
from edgellm.store import importing
from edgellm.units import format_bytes


def import_(
    path: Path,
    /,
    *,
    copy: bool = False,
    name: str | None = None,
    json: bool = False,
) -> None:
    """Put a GGUF file under edgellm's name, linked (no room is taken) or copied.

    All shards of a split model come along. The file itself is left as it is.

    Examples, one a line:

    * `edgellm import ~/Downloads/model-Q4_K_M.gguf`
    * `edgellm import --copy /mnt/usb/model.gguf`

    Parameters
    ----------
    path
        A .gguf file; of a split model any shard.
    copy
        Copy the bytes, so that the original may go.
    name
        Its name in the store.
    json
        Print JSON events, one a line.
    """
    if not (paths.exists(path) and path.is_file()):
        raise ModelNotFoundError(f"{path}: no such file", hint="edgellm ls")
    shown = listener(json)
    record = importing.import_model(
        path,
        check=check_file,
        mode="copy" if copy else "link",
        name=name,
        listener=shown,
        settings=config.load().settings.store,
    )
    if json:
        emit("complete", name=record.name, path=record.files[0].path, size=record.size)
        return
    how = "copied" if copy else "linked"
    print(f"{record.name} is {how}, {format_bytes(record.size or 0)}: {record.files[0].path}")
    print(f"  try: edgellm chat {record.name}")
