"""The project's own promises: documented modules, two set-up commands, no machine's paths, a careful bootstrap."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SET_UP = ("scripts/reproduce.sh", "scripts/test.sh")
SHELL = (*SET_UP, "scripts/bootstrap.sh", ".ci/run")

# Folders that exist on one developer's machine only. Spelled in pieces, or this file would find itself.
PRIVATE_FOLDERS = ("wo" + "rk", "ro" + "ot", "ho" + r"me/\w+", "Us" + r"ers/\w+")
PRIVATE_PATH = re.compile(rf"(?<![\w.)}}\]-])/(?:{'|'.join(PRIVATE_FOLDERS)})/")
DOCUMENTED = ("paxkv", "pallas_kernels", "experiments", "scripts")


def project_files() -> list[pathlib.Path]:
    """Files that git tracks or would track; without git, everything outside hidden folders."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        files = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not path.relative_to(ROOT).parts[0].startswith(".")]
    return sorted(path for path in files if path.is_file())


def private_paths(text: str) -> list[str]:
    """The lines of ``text`` that name a folder of one machine."""
    return [line for line in text.splitlines() if PRIVATE_PATH.search(line)]


def test_every_module_has_a_docstring():
    modules = [path.relative_to(ROOT) for path in project_files() if path.suffix == ".py"]
    modules = [path for path in modules if path.parts[0] in DOCUMENTED]
    assert modules
    bare = [str(path) for path in modules if not ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8")))]
    assert not bare, f"no docstring: {bare}"


def test_readme_names_the_two_set_up_commands():
    readme = (ROOT / "README.md").read_text("utf-8")
    for command in SET_UP:
        assert command in readme, f"README.md does not name {command}"


@pytest.mark.parametrize("name", SHELL)
def test_shell_scripts_run(name):
    assert os.access(ROOT / name, os.X_OK), f"{name} is not executable"
    subprocess.run(["bash", "-n", str(ROOT / name)], check=True)


def test_no_file_names_a_private_path():
    found = []
    for path in project_files():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # binary data
        found += [f"{path.relative_to(ROOT)}: {line.strip()[:120]}" for line in private_paths(text)]
    assert not found, "\n".join(found)


def test_private_path_is_noticed():
    home = "/ho" + "me/someone/"
    assert private_paths(f"see {home}notes") == [f"see {home}notes"]
    assert private_paths("../shared/data, $HOME/.pyenv, runs/wo" + "rk/x, https://a.org/ro" + "ot/") == []


def test_metadata():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def bootstrap(**settings: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/bootstrap.sh with ``settings``, where it must refuse: nothing is installed."""
    command = ["bash", str(ROOT / "scripts" / "bootstrap.sh")]
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=120)


def test_bootstrap_leaves_a_strangers_folder_alone(tmp_path):
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    result = bootstrap(PAXKV_VENV=str(tmp_path))
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert result.stdout == ""
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("python", ["3.999", "no-such-python"])
def test_bootstrap_names_a_python_it_cannot_find(tmp_path, python):
    result = bootstrap(PAXKV_VENV=str(tmp_path / "env"), PAXKV_PYTHON=python, PYENV_ROOT=str(tmp_path))
    assert result.returncode == 1
    assert f"PAXKV_PYTHON={python}" in result.stderr


def test_bootstrap_says_when_it_cannot_write(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    result = bootstrap(PAXKV_VENV=str(blocker / "env"))
    assert result.returncode == 1
    assert "cannot write" in result.stderr
