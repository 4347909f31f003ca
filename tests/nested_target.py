"""A tiny target shaped like Kimi-K2.5: remote code, the text model (latent attention, experts, YaRN in the old style)
under `text_config` and `language_model.`, sharded."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

from toy_chat import save_toy_tokenizer

LAYERS, HIDDEN = 6, 32
ROPE_SCALING = {
    **{"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 8},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}

CODE = """
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel

class NestedConfig(PretrainedConfig):
    model_type = "nested_k25"
    sub_configs = {"text_config": DeepseekV3Config}
    def __init__(self, text_config=None, **kwargs):
        self.text_config = DeepseekV3Config(**text_config) if isinstance(text_config, dict) else text_config
        super().__init__(**kwargs)

class NestedForConditionalGeneration(PreTrainedModel, GenerationMixin):
    config_class = NestedConfig
    _supports_sdpa = True
    def __init__(self, config):
        super().__init__(config)
        self.language_model = DeepseekV3ForCausalLM(config.text_config)
        self.post_init()
    def forward(self, *args, **kwargs):
        return self.language_model(*args, **kwargs)
"""


def save_nested_target(folder: Path) -> Path:
    """Hidden 32, 6 layers; float32; two shards, the second with embedding, norm and head."""
    save_toy_tokenizer(folder)
    torch.manual_seed(0)
    text = DeepseekV3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=HIDDEN,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=False,
        rope_theta=50000.0,
        rope_scaling=dict(ROPE_SCALING),
    )
    model = DeepseekV3ForCausalLM(text)
    _save_shards(folder, model)
    written = {key: value for key, value in text.to_dict().items() if key != "rope_parameters"}
    config = {
        "model_type": "nested_k25",
        "architectures": ["NestedForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "nested_code.NestedConfig",
            "AutoModelForCausalLM": "nested_code.NestedForConditionalGeneration",
        },
        "text_config": {**written, "rope_theta": 50000.0, "rope_scaling": ROPE_SCALING},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "nested_code.py").write_text(CODE)
    return folder


def _save_shards(folder: Path, model: DeepseekV3ForCausalLM) -> None:
    model.save_pretrained(folder / "plain")
    from safetensors.torch import load_file, save_file

    whole = load_file(folder / "plain" / "model.safetensors")
    shards: dict[str, dict[str, torch.Tensor]] = {"model-00001.safetensors": {}, "model-00002.safetensors": {}}
    for name, tensor in whole.items():
        last = "layers." not in name
        shards["model-00002.safetensors" if last else "model-00001.safetensors"][f"language_model.{name}"] = tensor
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in (folder / "plain").iterdir():
        path.unlink()
    (folder / "plain").rmdir()
