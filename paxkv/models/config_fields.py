"""The keys of a ``config.json``, read with their several spellings, defaults and complaints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paxkv.config import require
from paxkv.models.rotary import Rope

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Fields:
    """The keys of one config.json, read with defaults and complaints."""

    def __init__(self, hf: Mapping[str, Any]) -> None:
        self.hf = hf
        self.family = str(hf.get("model_type"))

    def need(self, *names: str) -> Any:
        """The first of ``names`` (spellings of one key) that is there and not null."""
        for name in names:
            if self.hf.get(name) is not None:
                return self.hf[name]
        raise ValueError(f"{self.family}: config.json must have {' or '.join(names)}; got {sorted(self.hf)}")

    def get(self, name: str, default: Any) -> Any:
        """The key, or ``default`` where it is absent or null."""
        value = self.hf.get(name)
        return default if value is None else value

    def refuse(self, name: str, accepted: Any, default: Any) -> None:
        """Complains unless the key, absent meaning ``default``, is what this decoder does."""
        value = self.get(name, default)
        require(value == accepted, f"{self.family}: {name}={value!r} is not supported, only {accepted!r}")

    def activation(self, *names: str, default: str) -> str:
        """Our name of the activation."""
        value = next((self.hf[name] for name in names if self.hf.get(name) is not None), default)
        known = ", ".join(ACTIVATION_NAMES)
        require(value in ACTIVATION_NAMES, f"{self.family}: activation must be one of {known}, got {value!r}")
        return ACTIVATION_NAMES[value]

    def rope(self, size: int, max_positions: int, base: float | None = None, *, interleaved: bool = False) -> Rope:
        """The rotary embedding over ``size`` lanes; the scaling's kind under ``rope_type`` or ``type``.

        Newer files hold everything, the base too, in ``rope_parameters``; older ones a scaling in ``rope_scaling``.
        """
        scaling = dict(self.hf.get("rope_scaling") or {}) | dict(self.hf.get("rope_parameters") or {})
        if base is None:
            base = self.get("rope_theta", 10000.0)
        base = float(scaling.get("rope_theta", base))
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind is None:
            extra = sorted(set(scaling) - {"rope_theta", "partial_rotary_factor"})
            require(not extra, f"{self.family}: rope scaling with {', '.join(extra)} must name its rope_type")
            kind = "default"
        if kind == "default":
            return Rope(size, base, interleaved=interleaved)
        options: dict[str, Any] = {}
        for key, field in _ROPE_KEYS.get(kind, {}).items():
            if scaling.get(key) is not None:
                options[field] = scaling[key]
        trained = scaling.get("original_max_position_embeddings") or max_positions
        factor = scaling.get("factor")
        require(factor is not None, f"{self.family}: {kind} rope scaling must have a factor, got {scaling}")
        return Rope(size, base, kind, float(factor), int(trained), interleaved=interleaved, **options)

    def dtype(self) -> str:
        """The dtype of the file's weights."""
        return str(self.get("dtype", self.get("torch_dtype", "float32"))).removeprefix("torch.")

    def windows(self, num_layers: int, window: int | None, has_window: Callable[[int], bool]) -> tuple[int, ...]:
        """Window of each layer; a list ``layer_types`` in the file decides over ``has_window``."""
        types = self.hf.get("layer_types")
        if types is not None:
            require(
                len(types) == num_layers and set(types) <= {"full_attention", "sliding_attention"},
                f"{self.family}: layer_types must name full_attention or sliding_attention for each of {num_layers} "
                f"layers, got {types}",
            )
        windows = []
        for layer in range(num_layers):
            slides = types[layer] == "sliding_attention" if types is not None else has_window(layer)
            windows.append(int(window) if slides and window else 0)
        return tuple(windows) if any(windows) else ()


_ROPE_KEYS = {
    "llama3": {"low_freq_factor": "low", "high_freq_factor": "high"},
    "yarn": {
        name: name for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    },
}
