"""Which of our files decide a result, so that it is computed again when one of them changes and only then."""

from __future__ import annotations

import ast
import functools
import hashlib
import pathlib

PACKAGE = pathlib.Path(__file__).resolve().parents[1]

DATA = {"paged_attention/tpu_tuned.py": "tuning/*.json"}
"""Files that a module reads when it is used, by the module's: what it decides depends on them too."""


@functools.cache
def imported(path: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """The files of ``pallas_kernels`` that a file of it imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:  # ``from a import b``: b may be a module
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            first, *rest = name.split(".")
            file = PACKAGE.joinpath(*rest).with_suffix(".py")
            if first == PACKAGE.name and rest and file.is_file():
                found.add(file)
    return tuple(sorted(found))


def closure(path: pathlib.Path) -> set[pathlib.Path]:
    """A file and all that it imports of ``pallas_kernels``, directly or not."""
    found, ahead = {path}, [path]
    while ahead:
        new = set(imported(ahead.pop())) - found
        found |= new
        ahead += new
    return found


@functools.cache
def fingerprint(op: str, implementation: str, data: bool = True) -> str:
    """SHA-256 of the files that make up an implementation of an op, with the op's checks.

    Args:
        data: with the files that are read when the implementation is used.
    """
    folder = PACKAGE / op
    module = folder / f"{implementation}.py"
    files = closure(folder / "arguments.py") if (folder / "arguments.py").is_file() else set()
    files |= {folder / "api.py", *(closure(module) if module.is_file() else ())}
    for reader, pattern in DATA.items():
        files |= set(PACKAGE.glob(pattern)) if data and PACKAGE / reader in files else set()
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def own_fingerprint() -> str:
    """SHA-256 of the files that compile and read: what a result is depends on them too."""
    names = ("proof/worker.py", "proof/targets.py", "proof/gpu_code.py", "schedule.py", "implementations.py")
    return hashlib.sha256(b"\0".join((PACKAGE / name).read_bytes() for name in names)).hexdigest()
