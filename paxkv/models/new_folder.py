"""A folder that is there complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator


@contextlib.contextmanager
def new_folder(path: str | pathlib.Path, needed_bytes: int = 0) -> Iterator[pathlib.Path]:
    """A folder to write into that becomes ``path`` when the block ends, and goes away when it raises.

    ::

        .NAME.RANDOM.part ──block ends──▶ synced ──rename──▶ NAME
                          ──it raises───▶ removed
                          ──killed──────▶ stays; nothing reads it, remove it by hand

    Args:
        needed_bytes: what will be written.

    Raises:
        FileExistsError: something is there already; it is left alone.
        FileNotFoundError: the folder above is not there.
        OSError: no room for ``needed_bytes``, or what writing raises.
    """
    path = pathlib.Path(path)
    if os.path.lexists(path):
        raise FileExistsError(f"{path} is there already and is not overwritten; give another path, or remove it first")
    above = path.absolute().parent
    if not above.is_dir():
        raise FileNotFoundError(f"folder {above} is not there; make it first, or check the path")
    free = shutil.disk_usage(above).free
    if free < needed_bytes:
        message = f"{path} needs {needed_bytes:,} bytes, but {free:,} are free there; free some, or write elsewhere"
        raise OSError(errno.ENOSPC, message)
    part = above / f".{path.name}.{secrets.token_hex(6)}.part"
    part.mkdir()
    try:
        yield part
        for folder, _, files in os.walk(part):
            for file in (*files, "."):
                _sync(os.path.join(folder, file))
        if os.path.lexists(path):  # an empty folder would be replaced
            raise FileExistsError(f"{path} appeared while it was written; it is left alone and this is dropped")
        os.rename(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    _sync(above)


def _sync(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(OSError):  # not every system can sync a folder; the rename itself is atomic
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
