"""Kimi-K2.5's published drafts, Llama-style and with latent attention: config, names and shapes, without weights."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

COMMON = {"hidden_size": 7168, "num_attention_heads": 64, "vocab_size": 163840, "draft_vocab_size": 32000,
          "num_hidden_layers": 1, "target_hidden_size": 7168, "num_aux_hidden_states": 3,
          "torch_dtype": "bfloat16"}  # fmt: skip
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_key_value_heads": 64,
    "head_dim": 128,
    "intermediate_size": 12288,
}
MLA = COMMON | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
}
PUBLISHED_REST = {
    "fc.weight": [7168, 21504],
    "norm.weight": [7168],
    "lm_head.weight": [32000, 7168],
    "d2t": [32000],
    **{f"layers.0.{name}.weight": [7168] for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
}
PUBLISHED_LLAMA = PUBLISHED_REST | {
    **{f"layers.0.self_attn.{name}_proj.weight": [8192, 14336] for name in "qkv"},
    "layers.0.self_attn.o_proj.weight": [7168, 8192],
    **{f"layers.0.mlp.{name}_proj.weight": [12288, 7168] for name in ("gate", "up")},
    "layers.0.mlp.down_proj.weight": [7168, 12288],
}
PUBLISHED_MLA = PUBLISHED_REST | {
    "layers.0.self_attn.q_a_proj.weight": [1536, 14336],
    "layers.0.self_attn.q_a_layernorm.weight": [1536],
    "layers.0.self_attn.q_b_proj.weight": [12288, 1536],
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": [576, 14336],
    "layers.0.self_attn.kv_a_layernorm.weight": [512],
    "layers.0.self_attn.kv_b_proj.weight": [16384, 512],
    "layers.0.self_attn.o_proj.weight": [7168, 8192],
    **{f"layers.0.mlp.{name}_proj.weight": [18432, 7168] for name in ("gate", "up")},
    "layers.0.mlp.down_proj.weight": [7168, 18432],
}


def draft_folder(folder: Path, config: dict[str, Any], shapes: dict[str, list[int]] | None = None) -> Path:
    """A folder whose weights are a header and a hole of the right size."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shapes is not None:
        header, end = {}, 0
        for name, shape in shapes.items():
            count = 1
            for axis in shape:
                count *= axis
            size = count * (8 if name == "d2t" else 2)
            header[name] = {
                "dtype": "I64" if name == "d2t" else "BF16",
                "shape": shape,
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return folder
