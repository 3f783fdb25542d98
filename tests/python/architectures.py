"""Architectures of transformers as models for tests: each as small as its configuration allows, without dropout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Tests must not use the network.

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 64
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEPTHS = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
FEW_EXPERTS = {**EXPERTS, "moe_intermediate_size": 16, "topk_group": 1, "moe_num_experts": 4, "moe_k": 2}

TEXT = {
    **TOKENS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
TRANSLATION = {
    **TOKENS,
    "decoder_start_token_id": 2,
    "d_model": 32,
    "hidden_size": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "d_kv": 16,
    "d_ff": 48,
    "num_experts": 4,
}
VISION = {
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_labels": 4,
}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_labels": 4,
    "classifier_proj_size": 16,
    "apply_spec_augment": False,
}
SPEECH = {
    **TRANSLATION,
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "max_source_positions": 16,
    "max_target_positions": 16,
    **{f"{side}_num_{what}": 2 for side in ("encoder", "decoder") for what in ("hidden_layers", "attention_heads")},
    **{f"{side}_num_key_value_heads": 2 for side in ("encoder", "decoder")},
    "intermediate_size": 48,
}


def named(*lines: str) -> dict[str, dict[str, Any]]:
    """Architectures that need no options besides those of their kind."""
    return {name: {} for line in lines for name in line.split()}


# For each kind: the class that makes the model, the options of all its architectures, and the special options of each.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "decoder": (
        transformers.AutoModelForCausalLM,
        TEXT,
        named(
            "gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt_neox opt bloom falcon mpt stablelm",
            "starcoder2 olmo2 cohere granite glm4 nemotron biogpt modernbert-decoder diffllama doge",
        ),
    ),
    "mixture": (
        transformers.AutoModelForCausalLM,
        {**TEXT, **FEW_EXPERTS},
        named("mixtral qwen2_moe qwen3_moe olmoe granitemoe phimoe jetmoe glm4_moe")
        | {"deepseek_v3": {"kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 1}},
    ),
    "state_space": (
        transformers.AutoModelForCausalLM,
        TEXT,
        named("mamba falcon_mamba rwkv lfm2") | {"mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1}},
    ),
    "encoder": (
        transformers.AutoModelForMaskedLM,
        TEXT,
        named(
            "albert bert roberta electra deberta deberta-v2 mpnet fnet convbert nystromformer modernbert rembert",
            "roformer esm ibert megatron-bert yoso xlm flaubert roberta-prelayernorm",
        ),
    ),
    "encoder_decoder": (
        transformers.AutoModelForSeq2SeqLM,
        TRANSLATION,
        named("bart mbart marian pegasus m2m_100 longt5 t5 umt5 switch_transformers nllb-moe pegasus_x"),
    ),
    "vision": (
        transformers.AutoModelForImageClassification,
        VISION,
        named("vit beit dinov2")
        | {
            "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
            "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
            "poolformer": DEPTHS,
            "segformer": {**DEPTHS, "num_attention_heads": [1, 1, 2, 2]},
            "pvt_v2": {**DEPTHS, "num_attention_heads": [1, 1, 2, 2]},
            "mobilenet_v2": {"depth_multiplier": 0.1},
        },
    ),
    "audio": (
        transformers.AutoModelForAudioClassification,
        AUDIO,
        named("wav2vec2 hubert wavlm sew unispeech-sat wav2vec2-conformer")
        | {"audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16, "patch_size": 8}},
    ),
    "speech": (transformers.AutoModelForSpeechSeq2Seq, SPEECH, named("whisper speech_to_text moonshine")),
}


def without_dropout(config: Any) -> Any:
    for name, value in list(vars(config).items()):
        if isinstance(value, transformers.PreTrainedConfig):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def inputs_of(name: str, kind: str, index: int) -> dict[str, torch.Tensor]:
    """Random inputs for element `index`."""
    generator = torch.Generator().manual_seed(index)
    tokens = torch.randint(3, VOCABULARY, (1, 12), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "vision":
        return {"pixel_values": noise(2, 3, 32, 32), "labels": tokens[0, :2] % 4}
    if kind == "audio":
        sound = noise(1, 32, 16) if name == "audio-spectrogram-transformer" else noise(1, 400)
        return {"input_values": sound, "labels": tokens[0, :1] % 4}
    if kind == "speech":
        if name == "moonshine":
            return {"input_values": noise(1, 1600), "labels": tokens}
        return {"input_features": noise(1, 8, 32) if name == "whisper" else noise(1, 32, 8), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens.clone()}


class Architecture(nn.Module):
    """A model with head and loss. forward() takes the number of an element."""

    def __init__(self, name: str, kind: str, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()
        self._name, self._kind = name, kind

    def forward(self, index: torch.Tensor | int) -> torch.Tensor:
        dtype = next(parameter.dtype for parameter in self.model.parameters() if parameter.is_floating_point())
        inputs = inputs_of(self._name, self._kind, int(index))
        cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        loss: torch.Tensor = self.model(**cast)["loss"]
        return loss


def build(name: str, kind: str, configuration: dict[str, Any]) -> Architecture:
    torch.manual_seed(0)
    config = without_dropout(CONFIG_MAPPING[name](**configuration))
    return Architecture(name, kind, KINDS[kind][0].from_config(config))


def architectures() -> Iterator[tuple[str, Architecture]]:
    transformers.logging.set_verbosity_error()
    for kind, (_, common, own) in KINDS.items():
        for name, special in own.items():
            yield f"{kind}_{name}", build(name, kind, {**common, **special})
