"""Write tests/golden/gguf-quantizer: types and checksums of the tensors that llama-quantize writes.

    scripts/goldens gguf-quantizer

- NAME.json: the configuration of a tiny Llama without a vocabulary, the shapes of its weights, whose values follow
  from `weights`, and for each file type the type and the start of the SHA-256 of each tensor: without importance, and with each
  of the two files.
- mixtures.json: the types of the tensors of larger models, with and without importance.
- NAME-imatrix.gguf, NAME-imatrix.dat: an importance matrix without the value projections, in both forms. The
  second is converted from the first by llama-imatrix.

llama.cpp's tools are built if they are missing (15 minutes on two cores, once).
"""

import itertools
import json
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from lib import GOLDEN, llama_cpp

import gguf
import numpy as np

FOLDER = GOLDEN / "gguf-quantizer"
HEADS, GROUPS, WIDTH = 8, 2, 32
TYPES = ["Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_NL", "IQ4_XS"]
TYPES += ["Q2_K_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "TQ1_0", "TQ2_0", "MXFP4_MOE", "IQ1_S", "IQ1_M"]
# Name, hidden size, size of the MLPs, experts, layers, file types. Rows of 96 and 160 are not complete blocks of 256.
MODELS = [
    ("dense", 256, 256, 0, 1, TYPES),
    ("odd", 96, 160, 0, 8, TYPES),
    ("experts", 256, 256, 4, 1, ["Q4_K_M", "Q4_0", "IQ2_XXS", "IQ2_S", "IQ3_XXS", "MXFP4_MOE"]),
]


def uniform(seed, count):
    """Numbers in [0, 1) by a hash of the seed and the index."""
    with np.errstate(over="ignore"):
        state = (np.uint64(seed << 32) + np.arange(count, dtype=np.uint64)) * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        state ^= state >> np.uint64(33)
        state *= np.uint64(0xFF51AFD7ED558CCD)
        state ^= state >> np.uint64(33)
    return (state >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)


def weights(seed, shape):
    values = (uniform(seed, int(np.prod(shape))) - np.float32(0.5)) * np.float32(0.1)
    values[::997] *= np.float32(8)
    return values.reshape(shape)


def shapes(hidden, inner, experts, layers):
    """Shapes by name in the model, and the names in the file."""
    width = HEADS * WIDTH if hidden == 256 else hidden
    groups = width // HEADS * GROUPS
    found = {"model.embed_tokens.weight": ("token_embd", (48, hidden)), "model.norm.weight": ("output_norm", (hidden,))}
    for layer in range(layers):
        parts = {"input_layernorm": ("attn_norm", (hidden,)), "post_attention_layernorm": ("ffn_norm", (hidden,))}
        parts |= {f"self_attn.{part}_proj": (f"attn_{part}", (rows, hidden)) for part, rows in (("q", width), ("k", groups), ("v", groups))}
        parts["self_attn.o_proj"] = ("attn_output", (hidden, width))
        mlp = [("gate_proj", "w1", "ffn_gate", (inner, hidden)), ("up_proj", "w3", "ffn_up", (inner, hidden)), ("down_proj", "w2", "ffn_down", (hidden, inner))]
        for dense, expert, name, shape in mlp:
            if experts:
                parts |= {f"block_sparse_moe.experts.{number}.{expert}": (f"{name}_exps.{number}", shape) for number in range(experts)}
            else:
                parts[f"mlp.{dense}"] = (name, shape)
        if experts:
            parts["block_sparse_moe.gate"] = ("ffn_gate_inp", (experts, hidden))
        found |= {f"model.layers.{layer}.{name}.weight": (f"blk.{layer}.{own}", shape) for name, (own, shape) in parts.items()}
    return found


def write_model(path, config, found):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    stacks = {}
    # The seed of a tensor is its position in the order of the names.
    for seed, (_, (own, shape)) in enumerate(sorted(found.items())):
        tensor = weights(seed, shape)
        if own.endswith(("attn_q", "attn_k")):
            tensor = llama_cpp.interleaved(tensor, HEADS if own.endswith("q") else GROUPS)
        module, _, number = own.rpartition(".")
        if "_exps." in own:
            stacks.setdefault(module, {})[int(number)] = tensor
        else:
            writer.add_tensor(f"{own}.weight", np.ascontiguousarray(tensor))
    for module, tensors in stacks.items():
        writer.add_tensor(f"{module}.weight", np.stack([tensors[number] for number in range(experts)]))
    llama_cpp.finish(writer)


def importance_writer(path, chunks, size):
    """A writer of an importance matrix, which has no architecture."""
    writer = gguf.GGUFWriter(path, "none")
    del writer.kv_data[0]["general.architecture"]
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", chunks)
    writer.add_uint32("imatrix.chunk_size", size)
    return writer


def write_importance(path, hidden, inner, experts, layers):
    writer = importance_writer(path, 4, 16)
    width = HEADS * WIDTH if hidden == 256 else hidden
    for layer in range(layers):
        stack = "_exps" if experts else ""
        columns = [("attn_q", hidden), ("attn_k", hidden), ("attn_output", width)]
        columns += [(f"ffn_gate{stack}", hidden), (f"ffn_up{stack}", hidden), (f"ffn_down{stack}", inner)]
        for number, (name, size) in enumerate(columns):
            count = experts if "ffn" in name and experts else 1
            sums = uniform(1000 + 10 * layer + number, count * size) ** 2 * np.float32(100)
            sums[5::37] *= np.float32(60)
            counts = np.array([64, 0, 7, 31][:count], dtype=np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight.in_sum2", sums.reshape(count, size))
            writer.add_tensor(f"blk.{layer}.{name}.weight.counts", counts.reshape(count, 1))
    llama_cpp.finish(writer)


def quantized(tools, model, kind, out, importance=None):
    """The tensors that llama-quantize writes; `None` if it refuses the type without an importance matrix."""
    matrix = ["--imatrix", importance] if importance else []
    done = subprocess.run([tools / "llama-quantize", *matrix, model, out, kind, "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        assert "importance matrix" in done.stdout, done.stdout
        return None
    return gguf.GGUFReader(out).tensors


def checksums(tensors):
    """Types and hashes of tensors, in the order of their names."""
    if tensors is None:
        return None
    tensors = sorted(tensors, key=lambda tensor: tensor.name)
    return " ".join(f"{tensor.tensor_type.name}:{sha256(tensor.data.tobytes()).hexdigest()[:8]}" for tensor in tensors)


# Name, layers, query heads, key heads, experts, whether there is a shared expert.
MIXTURES = [
    ("grouped", 32, 8, 4, 0, False),
    ("small values", 30, 8, 2, 0, False),
    ("70b", 80, 8, 1, 0, False),
    ("eight experts", 32, 8, 4, 8, False),
    ("four experts", 12, 8, 4, 4, False),
    ("shared expert", 16, 8, 4, 6, True),
]


def mixture(tools, scratch, layers, heads, groups, experts, shared):
    """Types of the tensors by module, as runs of layers, for each file type without and with importance."""
    architecture = "qwen2moe" if shared else "llama"
    model, matrix, out = (Path(scratch, f"mixture-{name}.gguf") for name in ("model", "imatrix", "out"))
    modules = ["attn_q", "attn_k", "attn_v", "attn_output"]
    modules += [f"ffn_{part}{kind}" for part in ("gate", "up", "down") for kind in (["_exps", "_shexp"] if shared else ["_exps"] if experts else [""])]
    writer = gguf.GGUFWriter(model, architecture)
    writer.add_vocab_size(4)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(256)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(1e-6)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    importance = importance_writer(matrix, 1, 1)
    names = ["token_embd", "output"] + [f"blk.{layer}.{module}" for layer in range(layers) for module in modules]
    for name in names:
        count = experts if name.endswith("_exps") else 1
        writer.add_tensor(f"{name}.weight", weights(0, (count, 4, 256) if count > 1 else (4, 256)))
        if name.startswith("blk"):
            importance.add_tensor(f"{name}.weight.in_sum2", np.ones((count, 256), dtype=np.float32))
            importance.add_tensor(f"{name}.weight.counts", np.ones((count, 1), dtype=np.float32))
    llama_cpp.finish(writer)
    llama_cpp.finish(importance)
    found = {}
    for kind in TYPES:
        found[kind] = []
        for used in (None, matrix):
            tensors = quantized(tools, model, kind, out, used)
            if tensors is None:
                found[kind].append(None)
                continue
            types = {tensor.name.removesuffix(".weight"): tensor.tensor_type.name for tensor in tensors}
            runs = {name: types[name] for name in ("token_embd", "output")}
            for module in modules:
                every = [types[f"blk.{layer}.{module}"] for layer in range(layers)]
                runs[module] = " ".join(f"{len(list(group))}*{name}" for name, group in itertools.groupby(every))
            found[kind].append(runs)
    return found


def write_json(path, contents):
    """Writes a file with a line for each key of the values."""
    lines = ",\n".join(f'"{key}": {{\n' + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()) + "\n}" for key, values in contents.items())
    path.write_text("{" + lines + "}\n")


def main():
    tools = llama_cpp.tools()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        files = {name: mixture(tools, scratch, *model) for name, *model in MIXTURES}
        write_json(FOLDER / "mixtures.json", files)
        for name, hidden, inner, experts, layers, types in MODELS:
            config = {"model_type": "mixtral" if experts else "llama", "architectures": ["MixtralForCausalLM" if experts else "LlamaForCausalLM"]}
            config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
            config |= {"vocab_size": 48, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "rope_theta": 10000.0}
            config["head_dim"] = WIDTH if hidden == 256 else hidden // HEADS
            if experts:
                config |= {"num_local_experts": experts, "num_experts_per_tok": 2}
            model, out = Path(scratch, f"{name}.gguf"), Path(scratch, "out.gguf")
            found = shapes(hidden, inner, experts, layers)
            write_model(model, config, found)
            importance, older = FOLDER / f"{name}-imatrix.gguf", FOLDER / f"{name}-imatrix.dat"
            write_importance(importance, hidden, inner, experts, layers)
            subprocess.run([tools / "llama-imatrix", "-m", model, "--in-file", importance, "-o", older, "--output-format", "dat", "-c", "16"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            files = {}
            for kind in types:
                files[kind] = [checksums(quantized(tools, model, kind, out, matrix)) for matrix in (None, importance, older)]
            write_json(FOLDER / f"{name}.json", {"config": config, "shapes": {tensor: list(shape) for tensor, (_, shape) in found.items()}, "files": files})


main()
