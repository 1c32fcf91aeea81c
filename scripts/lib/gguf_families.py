"""The tiny models of which `scripts/goldens gguf` writes GGUF files: names, architectures of llama.cpp or `None` if its
converter writes the file, and changes of their configurations and tensors that llama.cpp requires."""

import numpy as np

# llama.cpp supports one scale of the attention scores with latent attention.
SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.9, "mscale_all_dim": 0.9}
LLAMA4 = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "no_rope_layer_interval": 4, "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "moe_layers": [1, 3]}
LLAMA4 |= {"attention_bias": False, "attention_chunk_size": 8192, "use_qk_norm": True, "rope_theta": 5e5, "max_position_embeddings": 65536}
LLAMA4 |= {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}}
# llama.cpp loads queries without low rank only with this number of layers.
LITE = {"num_hidden_layers": 26, "first_k_dense_replace": 25, "hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 4}
LITE |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 128, "rope_scaling": SCALING}
# llama.cpp has no biases of attention here, and the converter writes `intermediate_size` for the dense networks.
ATTENTION = {"num_hidden_layers": 2, "layer_types": ["attention"] * 2, "attention_bias": False, "num_experts_per_tok": 0, "intermediate_size": 20}
# llama.cpp has the epsilon of the normalizations for queries and keys too, and no more pairs on all axes than elements.
DELTA = {"linear_key_head_dim": 5, "rms_norm_eps": 1e-6}
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
LATENT = {"attention_bias": False, "rms_norm_eps": 1e-6, "rope_scaling": SCALING}
# A key that the converter must not find.
ABSENT = object()
# Keys that only the converter reads.
CONVERTER_KEYS = ("mamba_d_head",)
# The converter knows dense networks only by letters, and takes models for those with experts if this key is present.
# llama.cpp has either dense networks or experts.
NEMOTRON = {"mamba_d_head": 6, "layers_block_type": None, "max_position_embeddings": 1 << 20}
DENSE = dict.fromkeys(["n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"], ABSENT)
FAMILIES = [
    ("llama", "llama", {}),
    ("llama-biases", "llama", {}),
    ("llama-grouped-tied", "llama", {}),
    ("llama-head-dim", "llama", {}),
    ("llama-rope-linear", "llama", {}),
    ("llama-rope-yarn", "llama", {}),
    ("llama-rope-llama3", "llama", {"rope_theta": 5e5, "max_position_embeddings": 65536, "original_max_position_embeddings": 8192}),
    ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {}),
    ("granite", "granite", {}),
    ("granite-biases", "granite", {}),
    ("mixtral", "llama", {"sliding_window": None}),
    ("qwen2-moe", "qwen2moe", {}),
    # llama.cpp supports one scale of the attention scores, and one pattern of sliding windows.
    ("gemma2", "gemma2", {"query_pre_attn_scalar": 8}),
    ("gemma", "gemma", {}),
    ("starcoder2", "starcoder2", {"sliding_window": None}),
    ("stablelm", "stablelm", {}),
    ("stablelm-parallel", "stablelm", {}),
    ("phi", "phi2", {}),
    ("cohere", "command-r", {"attention_bias": False}),
    ("cohere2", "cohere2", {}),
    ("olmo2", "olmo2", {}),
    ("olmo3", "olmo2", {}),
    ("ernie4_5", "ernie4_5", {}),
    ("hunyuan", "hunyuan-dense", {}),
    ("hunyuan-alpha", "hunyuan-dense", {"attention_bias": False}),
    ("glm4", "glm4", {}),
    ("glm", "chatglm", {"head_dim": 4}),
    ("glm4-moe", "glm4moe", {"num_nextn_predict_layers": 0}),
    ("glm4-moe-plain", "glm4moe", {"num_nextn_predict_layers": 0}),
    ("minimax-m2", "minimax-m2", {}),
    ("gpt-oss", "gpt-oss", {"swiglu_limit": 7.0}),
    ("smollm3", None, {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "bos_token_id": 1, "eos_token_id": 2}),
    # llama.cpp ignores windows.
    ("phi3", None, {"sliding_window": 64, "eos_token_id": 2}),
    ("phi3-longrope", None, {"eos_token_id": 2}),
    ("phi3-tied-partial", None, {"eos_token_id": 2}),
    # llama.cpp has constants for chunks and scales of queries.
    ("llama4-plain", None, LLAMA4),
    ("deepseek-v2", None, {**LATENT, "topk_method": "greedy", "n_group": None, "topk_group": None}),
    ("deepseek-v2-groups", None, LATENT),
    ("deepseek-v2-lite", None, LITE),
    ("deepseek-v3", "deepseek2", {**LATENT, "num_nextn_predict_layers": 0}),
    # The number of neurons is that of the weights.
    ("qwen3-next", None, {"mlp_only_layers": [], **DELTA}),
    ("qwen3_5", None, {"attention_bias": False, **DELTA, **AXES}),
    ("qwen3_5-moe", None, {**DELTA, **AXES}),
    ("granite-moe", None, {}),
    ("granite-moe-shared", None, {"attention_bias": False}),
    # The converter writes another length of the context for models without positions.
    ("granite-hybrid", None, {"max_position_embeddings": 1 << 20}),
    ("granite-hybrid-dense", None, ATTENTION),
    ("nemotron-h", None, {**NEMOTRON, **DENSE, "num_hidden_layers": 5, "hybrid_override_pattern": "M-*M-"}),
    ("nemotron-h-moe", None, {**NEMOTRON, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E"}),
    ("nemotron-h-latent", None, {**NEMOTRON, "num_hidden_layers": 3, "hybrid_override_pattern": "ME*", "use_bias": False, "use_conv_bias": True, "mlp_bias": False, "time_step_min": 0.001}),
    ("lfm2", "lfm2", {"intermediate_size": 28, "block_auto_adjust_ff_dim": False}),
    ("gemma3", "gemma3", {"query_pre_attn_scalar": 8, "sliding_window_pattern": 6, "_sliding_window_pattern": None, "rope_local_base_freq": 10000.0}),
]


def narrowed(name, tensor):
    """Half of each head."""
    if name.endswith("o_proj.weight"):
        return tensor.reshape(16, 4, 8)[:, :, :4].reshape(16, -1)
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "q_proj.bias", "k_proj.bias", "v_proj.bias")):
        return tensor.reshape(-1, 8, *tensor.shape[1:])[:, :4].reshape(-1, *tensor.shape[1:])
    return tensor


def without_linear_biases(name, tensor):
    return None if name.endswith(("_proj.bias", "experts.bias")) else tensor


def without_biases(name, tensor):
    return None if ".self_attn." in name and name.endswith(".bias") else tensor


def equal_widths(name, tensor):
    """Keys of gated delta networks with 5 of 6 elements, like values."""
    first = lambda heads: heads.reshape(2, 6, -1)[:, :5].reshape(10, -1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        keys = [first(tensor[start : start + 12]) for start in (0, 12)]
        return np.concatenate([*(part.reshape(10, *tensor.shape[1:]) for part in keys), tensor[24:]])
    if name.endswith("in_proj_qkvz.weight"):
        heads = tensor.reshape(2, 32, -1)
        return np.concatenate([heads[:, :5], heads[:, 6:11], heads[:, 12:]], axis=1).reshape(60, -1)
    return without_biases(name, tensor)


def unchanged(name, tensor):
    return tensor


def narrow(name, tensor):
    """One head, 4 neurons and a residual stream of 8 elements of DeepSeek-V2-Lite."""
    sizes = {"q_proj": (12, 8), "kv_b_proj": (14, 10), "o_proj": (8, 6), "mlp.gate_proj": (4, 8), "mlp.up_proj": (4, 8), "mlp.down_proj": (8, 4)}
    for end, (rows, columns) in sizes.items():
        if name.endswith(f"{end}.weight"):
            return tensor[:rows, :columns].copy()
    if name.endswith("kv_a_layernorm.weight"):
        return tensor
    return (tensor[:8] if tensor.ndim == 1 or name.endswith("down_proj.weight") else tensor[:, :8]).copy()


# The layers of the checkpoint with which layers of larger models begin.
LAYERS = {"granite-hybrid-dense": [1, 1], "smollm3": [0, 1, 0, 1], "llama4-plain": [0, 1, 0, 1], "deepseek-v2-lite": [0] * 25 + [1]}
LAYERS |= {"nemotron-h": [0, 1, 2, 0, 1], "nemotron-h-moe": [0, 3, 2, 3], "nemotron-h-latent": [0, 3, 2]}
# Models of tests/golden/models with other names.
SOURCES = {"deepseek-v2-groups": "deepseek-v2", "nemotron-h-moe": "nemotron-h"}


def with_layers(tensors, sources):
    """A model with copies of layers, of which every second one has its rows in reverse order."""
    others = {name: tensor for name, tensor in tensors.items() if ".layers." not in name}
    for layer, source in enumerate(sources):
        for name, tensor in tensors.items():
            start, _, rest = name.partition(f".layers.{source}.")
            if rest:
                others[f"{start}.layers.{layer}.{rest}"] = tensor if layer // 2 % 2 == 0 else tensor[::-1].copy()
    return others


def changed(name, tensors):
    """The tensors of a family that llama.cpp supports."""
    change = OTHER_TENSORS[name]
    tensors = {key: changed for key, tensor in tensors.items() if (changed := change(key, tensor)) is not None}
    if name in LAYERS:
        tensors = with_layers(tensors, LAYERS[name])
    if name == "nemotron-h-latent":
        # llama.cpp needs biases of convolutions.
        tensors |= {key.replace("weight", "bias"): tensor[:, 0, 0].copy() for key, tensor in tensors.items() if key.endswith("conv1d.weight")}
    if name == "qwen3-next":
        # Experts in all layers.
        start = "model.layers.1.mlp."
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(start)}
        experts = {key.replace(".0.mlp.", ".1.mlp.", 1): tensor[::-1].copy() for key, tensor in tensors.items() if ".0.mlp." in key}
        tensors |= experts
    return tensors


# llama.cpp supports no output biases in these families, one width of heads, and equal widths of keys and values of gated
# delta networks.
OTHER_TENSORS = {
    "cohere": without_biases,
    "granite-moe-shared": without_biases,
    "granite-hybrid-dense": without_biases,
    "nemotron-h": unchanged,
    "nemotron-h-moe": unchanged,
    "nemotron-h-latent": without_linear_biases,
    "smollm3": unchanged,
    "llama4-plain": without_biases,
    "deepseek-v2": without_biases,
    "deepseek-v2-groups": without_biases,
    "deepseek-v2-lite": narrow,
    "deepseek-v3": without_biases,
    "hunyuan-alpha": without_biases,
    "glm": narrowed,
    "qwen3-next": equal_widths,
    "qwen3_5": equal_widths,
    "qwen3_5-moe": equal_widths,
}
