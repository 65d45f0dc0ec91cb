"""GGUF files: metadata and tensors in one file, the weights mostly in blocks of small integers.

What the metadata says becomes the ``config.json`` it was made of, and tensors are read under the names that the
family's tensor map has for them, so a model from GGUF is the same value as one from a Hugging Face folder.

Three things differ from such a folder. Shapes are stored innermost first. Rows of q and k of the architecture
``llama`` are permuted, head by head, so that a rotated pair stands beside each other: row 2i is lane i and row 2i + 1
lane i + D/2. And GPT-2's projections, [in, out] elsewhere, are [out, in] here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxkv.compat import stacks_layers
from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.assembly import Progress, assemble
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.models.rotary import Rope, inverse_frequencies
from paxkv.models.weights import Tree

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
"""What ``general.architecture`` can be. Mistral's files say ``llama``."""
STORED = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
"""Types of tensors that are read."""
NEEDS_EXTRA = "*.gguf files need the package gguf: pip install 'paxkv[gguf]'"

# Key of the metadata, behind the architecture's name → key of config.json. Any other key is refused: it would change
# the arithmetic in a way that nobody here has looked at.
_KEYS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "rope.freq_base": "rope_theta",
}
_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
_CHECKED = ("attention.value_length", "rope.dimension_count")
_SCALING = ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scale_linear")
_IDLE = ("rope.scaling.finetuned", "tensor_data_layout")

# First part of a tensor's name in the tensor map → in the file.
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_LAYER = re.compile(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.+)")
_PERMUTED = re.compile(r"\.self_attn\.([qk])_proj\.")
_TURNED = re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$")
_ROPE_FACTORS = "rope_freqs.weight"


def load(
    path: str | pathlib.Path | GGUFFile,
    *,
    dtype: str | None = None,
    scan_layers: bool | None = None,
    progress: Progress | None = None,
) -> tuple[DecoderConfig, Tree]:
    """A decoder and its weights. Tensors are read and decoded one by one.

    Args:
        path: the file, or one that is open.
        dtype: of the weights. None: the file's where it holds float16 or bfloat16, else float32.
        scan_layers: weights stacked [L, ...] rather than by layer; None: stacked except on CPU.
        progress: called with (weights done, weights in all) after each.

    Raises:
        FileNotFoundError: no such file.
        ImportError: the package ``gguf`` is missing.
        ValueError: an architecture or a choice that is not supported; a file that is cut off; a tensor that is
            missing, of another shape, of a type that is not read, or of no use.
    """
    file = path if isinstance(path, GGUFFile) else GGUFFile(path)
    config = decoder_config(file)
    scan = stacks_layers() if scan_layers is None else scan_layers
    config = dataclasses.replace(config, dtype=dtype or config.dtype, scan_layers=scan)
    tensors = _Tensors(file, config)
    return config, assemble(config, tensors.read, progress)


class GGUFFile:
    """The metadata and the tensors of a file, under the file's own names. Tensors stay on disk until they are read.

    Args:
        path: of the file.

    Attributes:
        path: as given.
        architecture: what ``general.architecture`` says.

    Raises:
        FileNotFoundError, ImportError, ValueError: see :func:`load`.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = pathlib.Path(path)
        reader = _open(self.path)
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self.get("general.architecture")
        require(
            self.architecture in ARCHITECTURES,
            f"{self.path}: general.architecture must be one of {', '.join(ARCHITECTURES)}, got {self.architecture!r}",
        )

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata: a number, a text, a bool, or a list of them."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A value that must be there."""
        value = self.get(key)
        require(value is not None, f"{self.path} must have {key} in its metadata; convert the model again")
        return value

    def settings(self) -> dict[str, Any]:
        """What the metadata says of the architecture, without the architecture's name in front of each key."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): self.get(key) for key in self._fields if key.startswith(prefix)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, outermost first."""
        return {name: tuple(map(int, reversed(tensor.shape))) for name, tensor in self._tensors.items()}

    def kind(self, name: str) -> str:
        """Type of a tensor, such as ``Q4_1``."""
        return self._tensors[name].tensor_type.name

    def read(self, name: str) -> np.ndarray:
        """A tensor's numbers: float32, or float16 where it is stored so.

        Raises:
            ValueError: its type is not read.
        """
        from gguf.quants import dequantize

        found = self.kind(name)
        require(
            found in STORED,
            f"tensor {name} of {self.path}: expected one of {', '.join(STORED)}, found {found}; "
            "take a file of another quantisation, such as Q8_0",
        )
        data = np.asarray(self._tensors[name].data)
        return data if found in ("F32", "F16") else dequantize(data, self._tensors[name].tensor_type)


def _open(path: pathlib.Path):
    """The package's reader of the file, which is checked for its length first."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(NEEDS_EXTRA) from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is {'no file' if path.exists() else 'not there'}; give a file *.gguf")

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.memmap) -> None:
            # Slices of a plain view are made three times as fast, and a vocabulary is read in 100,000 of them.
            self._data = mapped.view(np.ndarray)

        def _build_tensors(self, start_offs: int, fields: Sequence) -> None:
            for field in fields:
                *_, dims, kind, offset = field.parts
                block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
                count = int(np.prod(dims, dtype=np.uint64)) // block * block_bytes
                end, found = int(start_offs + offset[0]) + count, len(self.data)
                if end > found:
                    raise _CutOff(f"tensor {field.name}: expected {count} bytes up to byte {end}, found {found} in all")
            super()._build_tensors(start_offs, fields)

    try:
        reader = Reader(path)
    except _CutOff as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}; download it again") from error
    except Exception as error:  # the package meets the end of a file with whatever numpy says there
        raise ValueError(
            f"{path} is not a whole GGUF file: its metadata ends early or is damaged, found {path.stat().st_size} "
            f"bytes in all ({type(error).__name__}: {error}); download it again"
        ) from error
    require(reader.byte_order == "I", f"{path} has the other byte order than this machine; convert it for this one")
    return reader


class _CutOff(ValueError):
    """A tensor that ends behind the file's end."""


def decoder_config(file: GGUFFile) -> DecoderConfig:
    """The decoder that the metadata describes.

    Raises:
        ValueError: a key that is missing, or one that is not known here.
    """
    family, said, shapes = file.architecture, file.settings(), file.shapes()
    known = (*_KEYS, *_CHECKED, *_SCALING, *_IDLE)
    for key, value in said.items():
        require(key in known, f"{file.path}: {family}.{key} = {value!r} is not supported; known are {', '.join(known)}")
        require(
            not isinstance(value, list),
            f"{file.path}: {family}.{key} must be one number for all layers, got {value}",
        )
    for key in _NEEDED:
        file.need(f"{family}.{key}")
    hf = {_KEYS[key]: value for key, value in said.items() if key in _KEYS}
    hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
    hf.setdefault("vocab_size", len(file.get("tokenizer.ggml.tokens", ())) or None)
    for key in _CHECKED:
        require(
            said.get(key, hf["head_dim"]) == hf["head_dim"],
            f"{file.path}: {family}.{key} must be the size of a head, {hf['head_dim']}, got {said.get(key)}",
        )
    epsilon = "layer_norm_epsilon" if family == "gpt2" else "layer_norm_rms_epsilon"
    file.need(f"{family}.attention.{epsilon}")
    config = from_hf_config(
        hf
        | {
            "model_type": family,
            "n_inner": hf["intermediate_size"],
            "attention_bias": "blk.0.attn_q.bias" in shapes,
            "mlp_bias": "blk.0.ffn_up.bias" in shapes,
            "tie_word_embeddings": "output.weight" not in shapes,
            "rope_scaling": _scaling(file, said),
            "torch_dtype": _dtype(file),
        }
    )
    return dataclasses.replace(config, rope=_llama3_rope(file, config)) if _ROPE_FACTORS in shapes else config


def _dtype(file: GGUFFile) -> str:
    """The type of the large weights; the blocks of quantised ones hold more bits than 16-bit floats keep."""
    kind = file.kind("token_embd.weight") if "token_embd.weight" in file.shapes() else "F32"
    return {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")


def _scaling(file: GGUFFile, said: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary scaling as a config.json has it."""
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear"))
    kind = said.get("rope.scaling.type", "linear" if factor is not None else "none")
    require(
        kind in ("none", "linear", "yarn"),
        f"{file.path}: rope.scaling.type must be none, linear or yarn, got {kind!r}",
    )
    if kind == "none":
        return None
    trained = said.get("rope.scaling.original_context_length")
    return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": trained}


def _llama3_rope(file: GGUFFile, config: DecoderConfig) -> Rope:
    """Llama 3's scaling, which files hold only as what it does: a divisor of each frequency."""
    divisors = file.read(_ROPE_FACTORS)
    plain = config.rope
    require(
        plain is not None and plain.kind == "default",
        f"{file.path}: {_ROPE_FACTORS} and another rotary scaling exclude each other, got {plain}",
    )
    factor = max(1.0, float(divisors.max(initial=1.0)))
    rope = Rope(plain.size, plain.base, "llama3", round(factor, 3), trained_length=8192, low=1.0, high=4.0)
    expected = inverse_frequencies(plain) / inverse_frequencies(rope)
    require(
        divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-4),
        f"tensor {_ROPE_FACTORS}: expected the {len(expected)} divisors of Llama 3's rule (trained length 8192, "
        f"frequency factors 1 and 4) at factor {rope.factor}, found {divisors.tolist()}",
    )
    return rope


class _Tensors:
    """The tensors of a file by the names that the family's tensor map has for them.

    Raises:
        ValueError: a tensor is missing, of another shape or type, or of no use.
    """

    def __init__(self, file: GGUFFile, config: DecoderConfig) -> None:
        self.file, self.config = file, config
        shapes, used = file.shapes(), {_ROPE_FACTORS}
        for rule in tensor_map(config):
            for source, shape in zip(rule.sources, rule.shapes, strict=True):
                name, weight = stored_name(source), "/".join(rule.path)
                want = shape[::-1] if self._turned(source) else shape
                if name not in shapes:
                    raise ValueError(
                        f"tensor {name}: expected {list(want)} for weight {weight}, not found in {file.path}; "
                        "convert the model again"
                    )
                require(
                    shapes[name] == want,
                    f"tensor {name} of {file.path}: expected {list(want)} for weight {weight}, "
                    f"found {list(shapes[name])}; its metadata belongs to another model",
                )
                require(
                    file.kind(name) in STORED,
                    f"tensor {name} of {file.path}: expected one of {', '.join(STORED)}, found {file.kind(name)}; "
                    "take a file of another quantisation, such as Q8_0",
                )
                used.add(name)
        for name in shapes:
            require(
                name in used,
                f"tensor {name} of {file.path}, {list(shapes[name])}: no weight of this {config.name} is made of it",
            )

    def _turned(self, name: str) -> bool:
        return self.file.architecture == "gpt2" and bool(_TURNED.search(name))

    def read(self, name: str) -> np.ndarray:
        """A tensor by the tensor map's name, its rows in that name's order."""
        tensor = self.file.read(stored_name(name))
        if self._turned(name):
            return tensor.T
        if self.file.architecture == "llama" and (found := _PERMUTED.search(name)):
            heads = self.config.num_heads if found[1] == "q" else self.config.num_kv_heads
            return halves(tensor, heads)
        return tensor


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, ...] with rotated pairs beside each other → with the pairs' first lanes first, by head."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def stored_name(name: str) -> str:
    """The file's name of a tensor that the tensor map calls ``name``."""
    body, _, last = name.rpartition(".")
    layer = _LAYER.fullmatch(body)
    return f"blk.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{last}" if layer else f"{_NAMES[body]}.{last}"
