"""Our own checkpoints: what was saved is loaded, to the bit, and a part of one never is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest

from paxkv.models import checkpoint, orbax_folder
from paxkv.models.weights import flatten, init_params, unflatten, unstack_layers
from paxkv.testing.tiny_model import tiny_config, tiny_params
from tests.models.checkpoints import HF, assert_same, config_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """The tiny model, saved; not to be changed."""
    path = tmp_path_factory.mktemp("orbax") / "tiny"
    checkpoint.save(tiny_config(), tiny_params(3), path)
    return path


def copy(saved: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    path.mkdir()
    for file in saved.rglob("*"):
        if file.is_file():
            (path / file.relative_to(saved)).parent.mkdir(parents=True, exist_ok=True)
            (path / file.relative_to(saved)).write_bytes(file.read_bytes())
    return path


@pytest.mark.parametrize("name", HF)
def test_configs_of_every_family_turn_back(tmp_path, name):
    # Fields alone, through the text of the file.
    config = config_of(name).at_length(40)
    path = tmp_path / "paxkv.json"
    written = json.loads(json.dumps(orbax_folder._to_json(config)))
    assert orbax_folder._from_json(written, path) == config


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek_v3", "bfloat16"), ("gemma2", "float32"), ("llama_tied", "float16")]
)
def test_weights_are_those_saved_in_either_form(tmp_path, name, dtype):
    stacked = dataclasses.replace(config_of(name), dtype=dtype, scan_layers=True)
    unrolled = dataclasses.replace(stacked, scan_layers=False)
    params = init_params(stacked, 3)
    checkpoint.save(stacked, params, tmp_path / "one")
    checkpoint.save(unrolled, unstack_layers(params, stacked), tmp_path / "two")
    for folder in ("one", "two"):
        for config, want in ((stacked, params), (unrolled, unstack_layers(params, stacked))):
            found, got = checkpoint.load(tmp_path / folder, scan_layers=config.scan_layers)
            assert found == config
            assert_same(got, want)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_another_dtype_and_progress(saved):
    seen = []
    config, params = checkpoint.load(saved, dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert config == tiny_config(dtype="bfloat16", scan_layers=False)
    want = flatten(unstack_layers(tiny_params(3), tiny_config()))
    assert_same(params, unflatten({path: value.astype(jnp.bfloat16) for path, value in want.items()}))
    assert seen == [(i + 1, len(want)) for i in range(len(want))]


def test_numbers_too_large_for_float16(tmp_path):
    params = tiny_params(3)
    params["final_norm"]["scale"] = params["final_norm"]["scale"].at[2].set(1e5)
    checkpoint.save(tiny_config(), params, tmp_path / "model")
    with pytest.raises(ValueError, match="weight final_norm/scale: a number is not finite in float16"):
        checkpoint.load(tmp_path / "model", dtype="float16")


def test_nothing_is_overwritten(tmp_path):
    for name, make in (("folder", pathlib.Path.mkdir), ("file", pathlib.Path.touch)):
        make(tmp_path / name)
        with pytest.raises(FileExistsError, match=f"{name} is there already and is not overwritten"):
            checkpoint.save(tiny_config(), tiny_params(), tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere is not there"):
        checkpoint.save(tiny_config(), tiny_params(), tmp_path / "nowhere" / "model")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_weights_of_another_model_are_not_saved(tmp_path):
    with pytest.raises(ValueError, match="weight layers/attention/out/kernel is missing"):
        checkpoint.save(tiny_config(), unstack_layers(tiny_params(), tiny_config()), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_write_that_raises_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(orbax_folder, "_to_json", full)  # the last thing that is written
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tiny_config(), tiny_params(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(OSError, match="model needs [0-9,]+ bytes, but 1,000 are free"):
        checkpoint.save(tiny_config(), tiny_params(), tmp_path / "model")
    assert not list(tmp_path.iterdir())


KILLED = """
import pathlib, sys, time
from paxkv.models import checkpoint, orbax_folder
from paxkv.testing.tiny_model import tiny_config, tiny_params
def stop(*_):
    print("weights are written", flush=True)
    time.sleep(60)
orbax_folder._to_json = stop
checkpoint.save(tiny_config(), tiny_params(), sys.argv[1])
"""


def test_a_killed_write_never_loads(tmp_path, repo_root):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "model")]
    with subprocess.Popen(command, cwd=repo_root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "weights are written\n"
        process.send_signal(signal.SIGKILL)
    [part] = tmp_path.iterdir()
    assert part.name.startswith(".model.") and (part / "weights").is_dir()
    with pytest.raises(FileNotFoundError, match="model is not there"):
        checkpoint.load(tmp_path / "model")
    with pytest.raises(FileNotFoundError, match="has no paxkv.json: writing it was cut short"):
        orbax_folder.load(part)
    with pytest.raises(FileNotFoundError, match="config.json"):
        checkpoint.load(part)
    checkpoint.save(tiny_config(), tiny_params(), tmp_path / "model")
    checkpoint.load(tmp_path / "model")


DAMAGED = """
import pathlib, sys
import numpy as np
from paxkv.models import checkpoint
from paxkv.models.weights import flatten
want = flatten(checkpoint.load(sys.argv[1])[1])
for path in sorted(pathlib.Path(sys.argv[2]).iterdir()):
    try:
        got = flatten(checkpoint.load(path)[1])
    except ValueError as error:
        print(path.name, "refused" if "save or copy it again" in str(error) else error)
    else:
        print(path.name, "same" if all(np.array_equal(got[name], want[name]) for name in want) else "different")
"""


def test_files_that_are_damaged(tmp_path_factory, tmp_path, repo_root):
    saved = tmp_path_factory.mktemp("orbax") / "one_layer"
    checkpoint.save(tiny_config(num_layers=1), tiny_params(3, tiny_config(num_layers=1)), saved)
    # Each file of the weights: missing, cut in half, and with a byte turned over. In a process of its own, for Orbax
    # leaves tasks behind that complain when they are collected.
    files = [file.relative_to(saved) for file in (saved / "weights").rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: (saved / file).stat().st_size)
    for i, file in enumerate(files):
        whole, middle = (saved / file).read_bytes(), (saved / file).stat().st_size // 2
        turned = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
        for name, damaged in (("gone", None), ("cut", whole[:middle]), ("turned", turned)):
            path = copy(saved, tmp_path / (name if file == largest else f"{name}-{i}"))
            (path / file).unlink() if damaged is None else (path / file).write_bytes(damaged)
    command = [sys.executable, "-c", DAMAGED, str(saved), str(tmp_path)]
    output = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=True).stdout
    results = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert len(results) == 3 * len(files)
    assert results["gone"] == results["cut"] == results["turned"] == "refused"
    # Files that are not read for this may be damaged; what is loaded is right.
    assert set(results.values()) == {"refused", "same"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda written: written.update(format=2), "must be of format 1, got 2, written by paxkv"),
        (lambda written: written.pop("decoder"), "must be of format 1"),
        (lambda written: written["decoder"].update(colour="red"), "does not describe a decoder.*colour"),
        (lambda written: written["decoder"].pop("name"), "does not describe a decoder.*name"),
        (lambda written: written["decoder"].update(num_heads=3), "query heads must be a multiple of KV heads"),
        (
            lambda written: written["decoder"].update(ffn_size=64),
            r"weight layers_0/ffn/down/kernel: expected \[64, 64\], found \[128, 64\]",
        ),
        (lambda written: written["decoder"].update(num_layers=4), "weight layers_3/.*: expected .*, not found"),
        (lambda written: written["decoder"].update(num_layers=2), "weight layers_2/.* is of no use"),
    ],
)
def test_a_description_that_does_not_fit(saved, tmp_path, change, message):
    path = copy(saved, tmp_path / "model")
    written = json.loads((path / "paxkv.json").read_text())
    change(written)
    (path / "paxkv.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=message):
        checkpoint.load(path)
