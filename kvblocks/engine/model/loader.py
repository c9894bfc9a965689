"""Loads a model's weights from the safetensors of a Hugging Face folder: one file, or shards with an index.

Every name and shape is checked against the configuration before any tensor is read, so an unusable folder is refused at
once. A tensor that the configuration doesn't know is refused too: a model that ignores it would run and give wrong
answers.

Each tensor is copied out of the mapped file into memory of its own, which torch aligns. Otherwise the bits of the
deterministic modes would depend on a tensor's place in the file. A file is mapped anew for each tensor, and unmapped
after the copy. So a process never has the weights in memory twice.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvblocks.engine.errors import ModelError
from kvblocks.engine.model.config import ModelConfig
from kvblocks.engine.model.fields import read_json
from kvblocks.engine.model.hybrid.latent import LatentAttention
from kvblocks.engine.model.hybrid.mixer import StateMixer
from kvblocks.engine.model.products import pack, packed_rows
from kvblocks.engine.model.rope import pair_order
from kvblocks.engine.model.weights import ExpertWeights, LayerWeights, ModelWeights

if TYPE_CHECKING:
    from kvblocks.engine.model.gguf.file import GGUFModel

_EMBEDDING, _FINAL_NORM, _LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_IS_ROTATED = re.compile(r"\.[qk]_proj\.(weight|bias)$")

# The names of a layer's norms. In models with output norms, "post_attention_layernorm" is the attention's output norm;
# in others it is the MLP's input norm.
_LLAMA_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}


def load_weights(
    path: "str | Path | GGUFModel",
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ModelWeights:
    """Load the weights that `config` describes from a folder or an open GGUF file, as `dtype` on `device`.

    Raises ModelError if the folder or a file is missing or broken, or if a tensor is missing, unexpected, of a wrong
    shape or not floating point. O(bytes of the model).
    """
    tensors = check_weights(path, config)
    reader = _Reader(tensors, config, dtype, torch.device(device))
    embedding, lm_head = _read_vocabulary(reader)
    return ModelWeights(
        embedding=embedding,
        layers=tuple(_read_layer(reader, index) for index in range(config.num_layers)),
        final_norm=reader.read_norm(_FINAL_NORM),
        lm_head=lm_head,
    )


def check_weights(path: "str | Path | GGUFModel", config: ModelConfig) -> dict[str, "_Stored"]:
    """Return the tensors of a folder or an open GGUF file by name. Raises ModelError unless they are `config`'s."""
    if isinstance(path, str | Path):
        found = _list_tensors(Path(path))
    else:
        found = [_Stored(path.path, one.name, one.shape, "F32", one.read) for one in path.tensors]
    tensors = _find_tensors(found, config)
    _check(tensors, config)
    return tensors


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and shape with this configuration. A folder may use other names (see `Architecture`)."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (config.vocab_size, hidden), _FINAL_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[_LM_HEAD] = (config.vocab_size, hidden)
    attending = config.attending
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        for name in _layer_norms(config).values():
            shapes[f"{prefix}{name}.weight"] = (hidden,)
        mlp, width = _mlp(config, index)
        of_layer = _attention_shapes(config) if index in attending else _mixer(config, index).shapes(hidden)
        if _has_experts(config, index):
            of_layer |= _expert_shapes(config)
        names, parts = _gate_up(config, mlp), 2 if config.architecture.has_fused_mlp else 1
        matrices = dict.fromkeys(names, (parts * width, hidden)) | {f"{mlp}.down_proj": (hidden, width)}
        of_layer |= _with_biases(matrices, has_bias=config.mlp_bias)
        shapes |= {prefix + name: shape for name, shape in of_layer.items()}
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer's attention. Where the output is gated, a head's gates are behind its queries."""
    hidden, architecture = config.hidden_size, config.architecture
    if config.latent is not None:
        return config.latent.shapes(hidden)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = _with_biases(
        {
            "self_attn.q_proj": (queries * (1 + architecture.has_output_gate), hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
        },
        has_bias=config.attention_bias,
    )
    shapes |= _with_biases({"self_attn.o_proj": (hidden, queries)}, has_bias=config.output_bias)
    if architecture.has_qk_norms:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _with_biases(matrices: Mapping[str, tuple[int, int]], *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """The weights, and if there are any the biases, of matrices by name."""
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in matrices.items()}
    if has_bias:
        shapes |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    return shapes


def _mixer(config: ModelConfig, layer: int) -> StateMixer:
    mixer = config.mixers[layer]
    assert mixer is not None, f"layer {layer} attends"
    return mixer


def _layer_norms(config: ModelConfig) -> Mapping[str, str]:
    """A layer's norms: each one's field in LayerWeights, and its name in a folder."""
    return _SANDWICH_NORMS if config.architecture.has_output_norms else _LLAMA_NORMS


def _mlp(config: ModelConfig, layer: int) -> tuple[str, int]:
    """The name of a layer's MLP, or of the expert that all rows share, and its width."""
    name = config.architecture.mlp_name
    if config.experts is None or not _has_experts(config, layer):
        return name, config.intermediate_size
    own = name if config.architecture.has_fused_mlp else f"{_experts(config)}.{config.architecture.shared_expert_name}"
    return own, config.experts.shared_width or config.experts.width


def _experts(config: ModelConfig) -> str:
    """The name of the tensors of a layer's experts."""
    return config.architecture.experts_name or config.architecture.mlp_name


def _has_experts(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and layer in config.experts.layers


def _gate_up(config: ModelConfig, mlp: str) -> tuple[str, ...]:
    """The names of an MLP's gate and up projections, or of the matrix that is both."""
    return (f"{mlp}.gate_up_proj",) if config.architecture.has_fused_mlp else (f"{mlp}.gate_proj", f"{mlp}.up_proj")


def _expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """A layer's experts in a folder: one by one, or with matrices of all of them.

    These are [num_experts, out, in] where MLPs are fused, and [num_experts, in, out] elsewhere.
    """
    assert config.experts is not None
    name, hidden = _experts(config), config.hidden_size
    num_experts, width = config.experts.num_experts, config.experts.width
    if config.architecture.has_fused_mlp:
        return {
            "block_sparse_moe.router.layer.weight": (num_experts, hidden),
            "block_sparse_moe.input_linear.weight": (num_experts, 2 * width, hidden),
            "block_sparse_moe.output_linear.weight": (num_experts, hidden, width),
        }
    if config.experts.weighs_outputs:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.gate.weight": (num_experts, hidden)}
        if config.experts.has_shared_gate:
            shapes[f"{name}.shared_expert_gate.weight"] = (1, hidden)
        gate, up, down = config.architecture.expert_matrices
        for expert in range(num_experts):
            own = f"{name}.experts.{expert}."
            shapes[f"{own}{gate}.weight"] = shapes[f"{own}{up}.weight"] = (width, hidden)
            shapes[f"{own}{down}.weight"] = (hidden, width)
        if config.experts.chooses_by_sigmoid:
            shapes[f"{name}.gate.e_score_correction_bias"] = (num_experts,)
        return shapes
    return {
        f"{name}.router.weight": (num_experts, hidden),
        f"{name}.experts.gate_up_proj": (num_experts, hidden, 2 * width),
        f"{name}.experts.down_proj": (num_experts, width, hidden),
    }


class _Stored(NamedTuple):
    """A tensor in a file: its name there, and its shape and dtype by the file's header.

    read: makes its values, float32; None: safetensors does.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], NDArray[np.float32]] | None = None


@dataclass(frozen=True)
class _Reader:
    """Reads tensors by name, and converts them to the model's dtype and device."""

    tensors: Mapping[str, _Stored]
    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def read(self, *names: str) -> Tensor:
        """The tensors stacked along their first dimension, in memory of their own."""
        parts = [self._load(name) for name in names]
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        stacked = torch.empty(shape, dtype=self.dtype, device=self.device)
        torch.cat([part.to(self.device, self.dtype) for part in parts], out=stacked)
        return stacked

    def read_matrix(self, *names: str) -> Tensor:
        """The tensors stacked, in the layout of `pack`. A single tensor isn't copied before."""
        if len(names) == 1:
            loaded = self._load(names[0]).to(self.device, self.dtype)
            packed = pack(loaded)
            if packed is not loaded:
                return packed
        return pack(self.read(*names))

    def read_norm(self, name: str) -> Tensor:
        """A norm's weight, in the form of LayerWeights."""
        if self.config.architecture.has_centered_norms:
            return self._load(name).to(self.device, torch.float32) + 1.0
        return self.read(name)

    def read_experts(self, prefix: str) -> ExpertWeights:
        """The experts of a layer, in the layout of `pack`."""
        kind = self.config.experts
        assert kind is not None
        names = [prefix + name for name in _expert_shapes(self.config)]
        is_fused = self.config.architecture.has_fused_mlp
        if kind.weighs_outputs and not is_fused:
            bias = self._load(names.pop()).to(self.device, torch.float32) if kind.chooses_by_sigmoid else None
            routers, matrices = names[: 1 + kind.has_shared_gate], names[1 + kind.has_shared_gate :]
            experts = [matrices[first : first + 3] for first in range(0, len(matrices), 3)]
            return ExpertWeights(
                self.read_matrix(*routers),
                tuple(self.read_matrix(gate, up) for gate, up, _ in experts),
                tuple(self.read_matrix(down) for _, _, down in experts),
                bias,
            )
        router, *stored = names
        gate_up, down = (
            tuple(
                pack((matrix if is_fused else matrix.T).contiguous().to(self.device, self.dtype))
                for matrix in self._load(name)
            )
            for name in stored
        )
        return ExpertWeights(self.read_matrix(router), gate_up, down)

    def read_qk_norm(self, prefix: str, layer: int) -> Tensor | None:
        """The weights of the heads' norms, one row a head, queries first; None in layers without them.

        A norm of rotated heads without weights is the same as one of heads with weights of 1 before they are rotated,
        since a rotation keeps the sum of squares.
        """
        config = self.config
        if config.norms_rotated and layer not in config.unrotated_layers:
            heads = config.num_heads + config.num_kv_heads
            return torch.ones(heads, config.head_dim, dtype=self.dtype, device=self.device)
        if not config.architecture.has_qk_norms:
            return None
        order = pair_order(config.rope, config.head_dim)
        query, key = (self.read_norm(f"{prefix}self_attn.{name}_norm.weight")[order] for name in ("q", "k"))
        return torch.cat([query.expand(self.config.num_heads, -1), key.expand(self.config.num_kv_heads, -1)])

    def read_mixer(self, mixer: StateMixer, prefix: str) -> dict[str, Any]:
        """The fields of `LayerWeights` that are a mixer's."""

        def read(name: str) -> Tensor:
            return self._load(prefix + name).to(self.device, torch.float32, copy=True)

        def moved(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias.to(self.dtype)

        found = mixer.load(read)
        return {
            "qkv": pack(found.input.to(self.dtype)),
            "output": pack(found.output.to(self.dtype)),
            "qkv_bias": moved(found.input_bias),
            "output_bias": moved(found.output_bias),
            "mixer": found.weights,
        }

    def read_latent(self, latent: LatentAttention, prefix: str) -> dict[str, Any]:
        """The fields of `LayerWeights` that are latent attention's."""
        return {
            "qkv": self.read_matrix(*(prefix + name for name in latent.inputs)),
            "output": self.read_matrix(prefix + latent.output),
            "latent": latent.load(lambda name: self.read(prefix + name)),
        }

    def _load(self, name: str) -> Tensor:
        """A tensor as it is used here. "q_proj.gates" are the gates in a stored "q_proj"."""
        part = 1 if ".gates." in name else 0
        stored = self.tensors[name.replace(".gates.", ".")]
        if stored.read is not None:
            return torch.from_numpy(stored.read())
        with _opened(stored.path) as file:
            loaded: Tensor = file.get_tensor(stored.name)  # this tensor keeps the mapping alive
        if self.config.architecture.has_rotated_pairs and _IS_ROTATED.search(name):
            # `rope.rotate` pairs i with i + head_dim / 2. The same order in queries and K leaves scores as they are.
            loaded = loaded.unflatten(0, (-1, self.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        head_dim, rope = self.config.head_dim, self.config.rope
        if self.config.architecture.has_output_gate and ".self_attn.q_proj." in name:
            loaded = loaded.unflatten(0, (-1, 2, head_dim))[:, part].flatten(0, 1)
        if not part and rope.rotated_dim(head_dim) < head_dim and _IS_ROTATED.search(name):
            loaded = loaded.unflatten(0, (-1, head_dim))[:, pair_order(rope, head_dim)].flatten(0, 1)
        return loaded


def _read_vocabulary(reader: _Reader) -> tuple[Tensor, Tensor]:
    """The embedding and the head. If they are tied, they share memory when the head's layout can be read by rows."""
    if not reader.config.tie_word_embeddings:
        return reader.read(_EMBEDDING), reader.read_matrix(_LM_HEAD)
    embedding = reader.read(_EMBEDDING)
    lm_head = pack(embedding)
    shared = packed_rows(lm_head, embedding)
    return (embedding, embedding) if shared is None else (shared, lm_head)


def _read_layer(reader: _Reader, index: int) -> LayerWeights:
    prefix, config = f"model.layers.{index}.", reader.config

    def read(kind: str, *names: str) -> Tensor:
        return reader.read(*(f"{prefix}{name}.{kind}" for name in names))

    def read_matrix(*names: str) -> Tensor:
        return reader.read_matrix(*(f"{prefix}{name}.weight" for name in names))

    qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    if config.architecture.has_output_gate:
        qkv.append("self_attn.q_proj.gates")
    mlp, _ = _mlp(config, index)
    gate_up, down = _gate_up(config, mlp), f"{mlp}.down_proj"
    if config.mixers and config.mixers[index] is not None:
        of_layer: dict[str, Any] = reader.read_mixer(_mixer(config, index), prefix)
    elif config.latent is not None:
        of_layer = reader.read_latent(config.latent, prefix)
    else:
        of_layer = {
            "qkv": read_matrix(*qkv),
            "output": read_matrix("self_attn.o_proj"),
            "qkv_bias": read("bias", *qkv) if config.attention_bias else None,
            "output_bias": read("bias", "self_attn.o_proj") if config.output_bias else None,
            "qk_norm": reader.read_qk_norm(prefix, index),
        }
    norms: dict[str, Any] = {
        field: reader.read_norm(f"{prefix}{name}.weight") for field, name in _layer_norms(config).items()
    }
    return LayerWeights(
        gate_up=read_matrix(*gate_up),
        down=read_matrix(down),
        gate_up_bias=read("bias", *gate_up) if config.mlp_bias else None,
        down_bias=read("bias", down) if config.mlp_bias else None,
        **of_layer,
        experts=reader.read_experts(prefix) if _has_experts(config, index) else None,
        **norms,
    )


def _list_tensors(folder: Path) -> list[_Stored]:
    """The tensors in the folder's safetensors files."""
    if not folder.is_dir():
        raise ModelError(f"expected a Hugging Face model folder, got {folder}, which is not a folder")
    found: list[_Stored] = []
    for path in _weight_files(folder):
        if not path.is_file():
            raise ModelError(f"expected the weight file {path}, which the index names; got none")
        with _opened(path) as file:
            entries = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118  # it is no dict
            found += [_Stored(path, name, tuple(entry.get_shape()), entry.get_dtype()) for name, entry in entries]
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A mapped file of safetensors. Raises ModelError if it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"expected safetensors in {path}, got: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ModelError(f"expected model.safetensors or model.safetensors.index.json in {folder}, got neither")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"expected a weight_map of tensor names to file names in {index}, got {weight_map!r:.100}")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"expected plain file names in {index}, got {outside[0]!r}")
    return [folder / name for name in names]


def _find_tensors(found: Iterable[_Stored], config: ModelConfig) -> dict[str, _Stored]:
    """The folder's tensors for this model, by the names that `expected_shapes` uses."""
    tensors: dict[str, _Stored] = {}
    for stored in found:
        if stored.name.startswith(config.architecture.ignored_prefixes):
            continue
        name = stored.name
        for prefix, ours in config.architecture.prefixes.items():
            if stored.name.startswith(prefix):
                name = ours + stored.name.removeprefix(prefix)
        for part, ours in config.architecture.tensor_names.items():
            name = name.replace(part, ours)
        if name in tensors:
            raise ModelError(f"expected one tensor for {name}, got {tensors[name].name} and {stored.name}")
        tensors[name] = stored
    return tensors


def _check(tensors: Mapping[str, _Stored], config: ModelConfig) -> None:
    """Compare names, shapes and dtypes with the configuration. Raises ModelError on the first difference."""
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        name = missing[0]
        for theirs, ours in config.architecture.tensor_names.items():
            name = name.replace(ours, theirs)
        raise ModelError(f"expected the tensor {name} in the weights, got none ({len(missing)} missing in all)")
    for name, stored in tensors.items():
        if name not in shapes:
            # Old checkpoints store RoPE's frequencies, and some store the tied head. Both are known without them.
            if name.endswith(".rotary_emb.inv_freq") or (name == _LM_HEAD and config.tie_word_embeddings):
                continue
            raise ModelError(f"expected no tensor {stored.name} with this configuration, got one")
        if stored.shape != shapes[name]:
            raise ModelError(f"expected {name} of shape {list(shapes[name])}, got {list(stored.shape)}")
        if stored.dtype not in _FLOAT_DTYPES:
            raise ModelError(
                f"expected {name} in floating point ({', '.join(sorted(_FLOAT_DTYPES))}), got {stored.dtype}"
            )
