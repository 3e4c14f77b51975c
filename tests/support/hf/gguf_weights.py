"""The weights of a Hugging Face folder as a GGUF file stores them, according to llama.cpp's conversion scripts
(gpt_oss.py, qwen.py and deepseek.py in conversion/). The folder's weights must not be packed.
"""

import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

NAMES = {  # a layer's modules: name in a GGUF file -> name in a Hugging Face folder
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufWeights:
    """A function of a GGUF tensor that returns its values, float32 [sizes]. config: that of the folder."""

    def __init__(self, folder: Path, config):
        self.config, self.read = config, {}
        for file in folder.glob("*.safetensors"):
            self.read |= load_file(file)

    def __call__(self, tensor) -> np.ndarray:
        found = self._found(tensor.name)
        if self.config.norm_plus_one and tensor.name.endswith("norm.weight") and "ssm_norm" not in tensor.name:
            found = found + 1
        assert found.size == np.prod(tensor.sizes), (tensor.name, found.shape, tensor.sizes)
        return found.reshape(tensor.sizes)

    def _found(self, name: str) -> np.ndarray:
        if name in OUTSIDE:
            return self._hf(OUTSIDE[name])
        layer, module = re.fullmatch(r"blk\.(\d+)\.(.+)", name).groups()
        prefix = f"model.layers.{layer}"
        if self.config.attention_sinks and (found := self._gpt_oss(prefix, module)) is not None:
            return found
        name, kind = module.rsplit(".", 1) if module.endswith(".bias") else (module.removesuffix(".weight"), "weight")
        module = module.removesuffix(".weight")
        if (found := re.fullmatch(r"ffn_(gate|up|down)_exps", module)) is not None:
            experts = range(self.config.num_experts)
            return np.stack([self._hf(f"{prefix}.mlp.experts.{n}.{found[1]}_proj.weight") for n in experts])
        if (found := re.fullmatch(r"ffn_(gate|up|down)_shexp", module)) is not None:
            shared = "shared_expert" if self.config.delta_net else "shared_experts"
            return self._hf(f"{prefix}.mlp.{shared}.{found[1]}_proj.weight")
        match module:
            case "exp_probs_b.bias":
                return self._hf(f"{prefix}.mlp.gate.e_score_correction_bias")
            case "ssm_a":
                return -np.exp(self._hf(f"{prefix}.linear_attn.A_log"))
            case "ssm_dt.bias":
                return self._hf(f"{prefix}.linear_attn.dt_bias")
            case "attn_qkv" | "attn_gate":
                return self._qkvz(prefix)[module == "attn_gate"]
            case "attn_k_b" | "attn_v_b":
                return self._of_latents(prefix)[module == "attn_v_b"]
        return self._hf(f"{prefix}.{NAMES[name]}.{kind}")

    def _gpt_oss(self, prefix: str, module: str) -> np.ndarray | None:
        """A tensor that GPT-OSS names differently, else None. Its experts share one tensor [experts, inputs, outputs],
        in which gate and up columns alternate.
        """
        name, kind = module.rsplit(".", 1)
        match name:
            case "attn_sinks":
                return self._hf(f"{prefix}.self_attn.sinks")
            case "ffn_gate_inp":
                return self._hf(f"{prefix}.mlp.router.{kind}")
            case "ffn_gate_exps" | "ffn_up_exps" | "ffn_down_exps":
                own = "down_proj" if name == "ffn_down_exps" else "gate_up_proj"
                found = self._hf(f"{prefix}.mlp.experts.{own}{'_bias' if kind == 'bias' else ''}")
                if own == "gate_up_proj":
                    found = found[..., name == "ffn_up_exps" :: 2]
                return found if kind == "bias" else found.swapaxes(1, 2)
        return None

    def _hf(self, name: str) -> np.ndarray:
        return self.read[name].astype(np.float32)

    def _qkvz(self, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows of q, k and v of all heads, and rows of z. The folder stores q, k, v and z of each key head together."""
        sizes, rows = self.config.delta_net, self._hf(f"{prefix}.linear_attn.in_proj_qkvz.weight")
        values = sizes.value_heads // sizes.key_heads * sizes.value_dim
        parts = np.split(
            rows.reshape(sizes.key_heads, -1, rows.shape[-1]), np.cumsum([sizes.key_dim, sizes.key_dim, values]), 1
        )
        q, k, v, z = (part.reshape(-1, rows.shape[-1]) for part in parts)
        return np.concatenate([q, k, v]), z

    def _of_latents(self, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """For each head, the transposed matrix that computes keys from latents, and the matrix that computes values."""
        sizes, rows = self.config.latent_attention, self._hf(f"{prefix}.self_attn.kv_b_proj.weight")
        by_head = rows.reshape(self.config.num_attention_heads, -1, rows.shape[-1])
        keys, values = np.split(by_head, [sizes.qk_nope_head_dim], 1)
        return keys.swapaxes(1, 2), values
