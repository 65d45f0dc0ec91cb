"""GGUF files: a model from one is what it was made of, blocks decode as their formula says, faults are named."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.models import checkpoint
from paxkv.models.architecture import DecoderConfig
from paxkv.models.gguf_file import GGUFFile, decoder_config, halves, load, stored_name
from paxkv.models.rotary import Rope, inverse_frequencies
from paxkv.models.weights import flatten
from tests.models.checkpoints import HF, assert_same, config_of, params_of, tensors_of

EMBEDDING, NORM, Q = "token_embd.weight", "blk.1.attn_norm.weight", "blk.0.attn_q.weight"


def pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order that the format keeps them in: of each head, lane 0, lane D/2, lane 1, lane D/2 + 1, ..."""
    size = len(rows) // heads
    order = [
        head * size + half * size // 2 + lane for head in range(heads) for lane in range(size // 2) for half in (0, 1)
    ]
    return rows[order]


def stored(name: str) -> dict[str, np.ndarray]:
    """The tensors of a tiny model as the format keeps them."""
    config, tensors = config_of(name), {}
    for source, tensor in tensors_of(name).items():
        if config.name == "llama" and (".q_proj" in source or ".k_proj" in source):
            tensor = pairs(tensor, config.num_heads if ".q_proj" in source else config.num_kv_heads)
        if config.name == "gpt2" and tensor.ndim == 2 and ".h." in source:
            tensor = tensor.T
        tensors[stored_name(source)] = tensor
    return tensors


def settings_of(config: DecoderConfig) -> dict:
    """The metadata of a tiny model."""
    rms = config.norm == "rms"
    settings = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.ffn_size,
        "attention.head_count": config.num_heads,
        "attention.layer_norm_rms_epsilon" if rms else "attention.layer_norm_epsilon": float(config.norm_eps),
    }
    if rms:
        settings |= {
            "attention.head_count_kv": config.num_kv_heads,
            "attention.key_length": config.head_size,
            "attention.value_length": config.head_size,
            "rope.dimension_count": config.head_size,
            "rope.freq_base": config.rope.base,
        }
    return settings


def write(folder: pathlib.Path, name: str, tensors=None, *, kind: str = "F32", kinds=None, arch=None, **changes):
    """A file of a tiny model. Arguments: its tensors; their type; those of another type; metadata that differs."""
    config = config_of(name)
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, arch or config.name)
    for key, value in (settings_of(config) | changes).items():
        if isinstance(value, str):
            writer.add_string(f"{config.name}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{config.name}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{config.name}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{config.name}.{key}", value)
    for key, tensor in (stored(name) if tensors is None else tensors).items():
        tensor = np.ascontiguousarray(tensor)
        wanted = (kinds or {}).get(key, kind if tensor.ndim == 2 and tensor.shape[-1] % 32 == 0 else "F32")
        quantised = gguf.GGMLQuantizationType[wanted]
        if tensor.dtype != np.float32 or wanted == "F32":
            writer.add_tensor(key, tensor)
        else:
            writer.add_tensor(key, gguf.quants.quantize(tensor, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gpt2"])
def test_a_model_is_that_which_was_stored(tmp_path, name, stacked):
    config, params = load(write(tmp_path, name), scan_layers=stacked)
    want = dataclasses.replace(config_of(name), scan_layers=stacked, dtype="float32")
    if name == "gpt2":  # its files always have the epsilon, and a head
        want = dataclasses.replace(want, norm_eps=config.norm_eps)
    assert dataclasses.replace(config, norm_eps=want.norm_eps) == want
    assert config.norm_eps == pytest.approx(want.norm_eps)
    assert_same(params, params_of(name, stacked=stacked))


def test_qwen2(tmp_path):
    """Its rows of q and k stand as they are; windows have no key in the format."""
    config, params = load(write(tmp_path, "qwen2"), scan_layers=True)
    assert dataclasses.replace(config_of("qwen2"), norm_eps=config.norm_eps, windows=(), scan_layers=True) == config
    assert_same(params, params_of("qwen2", stacked=True))


def test_through_the_common_door(tmp_path):
    seen = []
    config, params = checkpoint.load(write(tmp_path, "llama"), progress=lambda *done: seen.append(done))
    assert_same(params, params_of("llama", stacked=config.scan_layers))
    assert seen == [(i, len(seen)) for i in range(1, len(seen) + 1)]


def test_rows_are_put_back():
    """Lane i and lane i + D/2 of a head stand beside each other in the file; with 576 columns as SmolLM2 has."""
    rows = np.arange(9 * 64 * 576, dtype=np.float32).reshape(9 * 64, 576)
    np.testing.assert_array_equal(halves(pairs(rows, 9), 9), rows)
    assert halves(np.arange(8), 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


# --- types ----------------------------------------------------------------------------------------


def decoded(kind: str, blocks: np.ndarray) -> np.ndarray:
    """Numbers of one row of blocks, written down from the format's description, a byte at a time."""
    numbers = []
    for block in blocks:
        raw = block.tobytes()
        scale = float(np.frombuffer(raw[:2], "<f2")[0])
        if kind == "Q8_0":
            numbers += [scale * value for value in np.frombuffer(raw[2:], np.int8).tolist()]
            continue
        low = float(np.frombuffer(raw[2:4], "<f2")[0]) if kind == "Q4_1" else -8 * scale
        nibbles = raw[4:] if kind == "Q4_1" else raw[2:]
        numbers += [low + scale * (byte & 15) for byte in nibbles] + [low + scale * (byte >> 4) for byte in nibbles]
    return np.float32(numbers)


@pytest.mark.parametrize(("kind", "size"), [("Q8_0", 34), ("Q4_0", 18), ("Q4_1", 20)])
def test_blocks(tmp_path, kind, size):
    """Every byte pattern can come, not only those that a quantiser makes of nice numbers."""
    rng = np.random.default_rng(size)
    raw = rng.integers(0, 256, (40, 1, size), np.uint8)
    scales = rng.uniform(-2, 2, (40, 1, 2 if kind == "Q4_1" else 1)).astype("<f2")
    raw[..., : 2 * scales.shape[-1]] = scales.view(np.uint8)
    path = tmp_path / "blocks.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(EMBEDDING, raw.reshape(40, size), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert file.shapes() == {EMBEDDING: (40, 32)} and file.kind(EMBEDDING) == kind
    want = np.stack([decoded(kind, row) for row in raw])
    np.testing.assert_allclose(file.read(EMBEDDING), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [("F16", "float16", 1e-3), ("BF16", "bfloat16", 5e-3), ("Q8_0", "float32", 1e-2), ("Q4_1", "float32", 0.15)],
)
def test_types(tmp_path, kind, dtype, error):
    """Weights come out close to what went in, in the file's own type where that is a float."""
    config, params = load(write(tmp_path, "llama", kind=kind), scan_layers=True)
    assert config.dtype == dtype
    got, want = flatten(params), flatten(params_of("llama", stacked=True))
    for path, value in want.items():
        assert got[path].dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.float32(got[path]), value, atol=error * np.abs(value).max())
    config, params = load(write(tmp_path, "llama", kind=kind), dtype="float32")
    assert config.dtype == "float32" and params["embedding"].dtype == jnp.float32


def test_another_type(tmp_path):
    path = write(tmp_path, "llama", kinds={Q: "Q5_0"})
    with pytest.raises(ValueError, match=f"tensor {Q} of .*expected one of F32, F16, .*found Q5_0"):
        load(path)


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path, kind):
    changes = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    config = decoder_config(GGUFFile(write(tmp_path, "qwen3", **changes)))
    assert (config.rope.kind, config.rope.factor, config.rope.trained_length) == (kind, 4.0, 16)
    assert config.rope.base == config_of("qwen3").rope.base


def test_llama3_rope_is_found_in_its_divisors(tmp_path):
    plain, scaled = Rope(8, 5e5), Rope(8, 5e5, kind="llama3", factor=32.0, trained_length=8192)
    divisors = np.float32(inverse_frequencies(plain) / inverse_frequencies(scaled))
    assert divisors[0] == 1 < divisors[2] < divisors[3] == 32  # kept, blended, stretched
    tensors, base = stored("llama") | {"rope_freqs.weight": divisors}, {"rope.freq_base": 5e5}
    assert load(write(tmp_path, "llama", tensors, **base))[0].rope == scaled
    with pytest.raises(ValueError, match="tensor rope_freqs.weight: expected the 4 divisors of Llama 3's rule"):
        load(write(tmp_path, "llama", tensors | {"rope_freqs.weight": divisors[::-1].copy()}, **base))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.sliding_window": 16}, "llama.attention.sliding_window = 16 is not supported"),
        ({"attention.head_count_kv": [2, 4]}, "must be one number for all layers"),
        ({"attention.value_length": 16}, "attention.value_length must be the size of a head, 8, got 16"),
        ({"rope.dimension_count": 4}, "rope.dimension_count must be the size of a head, 8, got 4"),
        ({"rope.scaling.type": "longrope"}, "must be none, linear or yarn, got 'longrope'"),
        ({"rope.scaling.type": "linear"}, "must have a factor"),
        ({"block_count": None}, "must have llama.block_count"),
        ({"attention.layer_norm_rms_epsilon": None}, "must have llama.attention.layer_norm_rms_epsilon"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_metadata_that_cannot_be_read(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, "llama", **changes))


def test_an_unknown_architecture(tmp_path):
    with pytest.raises(ValueError, match="general.architecture must be one of llama, .*got 'mamba'"):
        load(write(tmp_path, "llama", arch="mamba"))


# --- faults ---------------------------------------------------------------------------------------


def test_a_missing_tensor(tmp_path):
    tensors = stored("llama")
    del tensors[NORM]
    message = rf"tensor {NORM}: expected \[32\] for weight layers_1/attention_norm/scale, not found"
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, "llama", tensors))


def test_a_tensor_of_another_shape(tmp_path):
    with pytest.raises(ValueError, match=rf"tensor {NORM} of .*expected \[32\] for weight .*, found \[31\]"):
        load(write(tmp_path, "llama", stored("llama") | {NORM: np.ones(31, np.float32)}))
    with pytest.raises(ValueError, match=r"tensor blk.0.ffn_down.weight of .*expected \[32, 24\] .*found \[24, 32\]"):
        load(write(tmp_path, "llama", stored("llama") | {"blk.0.ffn_down.weight": np.ones((24, 32), np.float32)}))


def test_a_tensor_of_no_use(tmp_path):
    bias = {"blk.0.attn_v.bias": np.zeros(16, np.float32)}
    with pytest.raises(ValueError, match=r"tensor blk.0.attn_v.bias of .*, \[16\]: no weight of this llama"):
        load(write(tmp_path, "llama", stored("llama") | bias))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (0.9, r"tensor blk\.\d\.\S+: expected \d+ bytes up to byte \d+, found \d+ in all"),
        (0.01, r"its metadata ends early or is damaged, found \d+ bytes in all"),
        (0, "its metadata ends early or is damaged, found 0 bytes in all"),
    ],
)
def test_a_file_that_is_cut_off(tmp_path, keep, message):
    path = write(tmp_path, "llama")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(ValueError, match=f"llama.gguf is not a whole GGUF file: {message}.*download it again"):
        load(path)


def test_a_file_that_is_something_else(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"<!DOCTYPE html>" * 100)
    with pytest.raises(ValueError, match="is not a whole GGUF file: .*damaged, found 1500 bytes.*magic invalid"):
        load(path)
    with pytest.raises(FileNotFoundError, match="not there"):
        load(tmp_path / "none.gguf")
    with pytest.raises(FileNotFoundError, match="no file"):
        load(tmp_path)


def test_the_package_is_asked_for_by_name(tmp_path, monkeypatch):
    path = write(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'paxkv\[gguf\]'"):
        load(path)


def test_every_tensor_name_of_the_families_is_known():
    """Names are those that the format's own table gives."""
    for name, arch in (("llama_tied", "LLAMA"), ("qwen2", "QWEN2"), ("qwen3", "QWEN3"), ("gpt2", "GPT2")):
        table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], HF[name].get("num_hidden_layers", 2))
        for source in tensors_of(name):
            assert stored_name(source) == table.get_name(source, (".weight", ".bias")), source
