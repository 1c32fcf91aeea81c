"""Write tests/golden/gguf: files as llama.cpp's converter writes them, by the package `gguf`, with their
decoded values.

    scripts/goldens gguf [TEXT…]      all files, or only the families whose name contains one of the texts

- `blocks.gguf`: random blocks of every supported type, and `blocks.safetensors`: the values that the package
  decodes.
- `quantized.safetensors`: values, and the blocks that the package encodes; for the K and IQ types, and for all types
  with importance of columns, those of the C source of llama.cpp.
- FAMILY.gguf: the tiny models of tests/golden/models with the names and row order of GGUF files, and
  FAMILY.json, their config.json.
- tokenizer-NAME.gguf: tiny models with one vocabulary each, and tokens.json: texts with their tokens by the
  library `tokenizers`.
"""

import ctypes
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import GOLDEN, ROOT, llama_cpp
from lib.arrays import save_file
from lib.gguf_families import ABSENT, CONVERTER_KEYS, FAMILIES, OTHER_TENSORS, SOURCES, changed

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

ONLY = sys.argv[1:]
MODELS, FOLDER = GOLDEN / "models", GOLDEN / "gguf"
READ = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K]
# Types added later: their random blocks are drawn last, so that the others stay the same.
LATER = [Type.Q2_K, Type.Q3_K, Type.IQ4_NL, Type.IQ4_XS]
LATER += [Type.MXFP4, Type.TQ1_0, Type.TQ2_0, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S, Type.IQ1_M]
# Types that ggml does not encode without importance.
WEIGHTED = [Type.IQ2_XXS, Type.IQ2_XS, Type.IQ1_S]
# Offsets of the binary16 scales in a block.
SCALES = {Type.MXFP4: [], Type.IQ1_M: [], Type.TQ1_0: [52], Type.TQ2_0: [64], Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q6_K: [208], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q4_1: [0, 2], Type.Q5_1: [0, 2]}


def blocks(random):
    """Random bytes, with zero, subnormal, maximum and ordinary scales."""
    writer, values = gguf.GGUFWriter(FOLDER / "blocks.gguf", "none"), {}

    def add(kind):
        _, size = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = 3, 6
        data = random.integers(0, 256, (rows * columns, size), dtype=np.uint8)
        for at in SCALES.get(kind, [0]):
            scales = random.normal(0, 0.01, rows * columns).astype(np.float16)
            scales[:4] = [0.0, 6e-8, 65504.0, -3e-5]
            data[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
        data = data.reshape(rows, columns * size)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
        values[kind.name] = gguf.dequantize(data, kind)

    for kind in READ:
        add(kind)
    plain = random.normal(0, 1, (5, 7)).astype(np.float32)
    for kind, name in ((Type.F32, "F32"), (Type.F16, "F16"), (Type.BF16, "BF16")):
        data = gguf.quantize(plain, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = gguf.dequantize(data, kind)
    for kind in LATER:
        add(kind)
    llama_cpp.finish(writer)
    save_file(values, FOLDER / "blocks.safetensors")


# Symbols that the compiled C file references but does not use here.
STUBS = """
#include <stdlib.h>
float ggml_table_f32_f16[1 << 16];
void ggml_abort(const char * file, int line, const char * format, ...) { abort(); }
void ggml_critical_section_start(void) {}
void ggml_critical_section_end(void) {}
void ggml_log_internal(int level, const char * format, ...) {}
size_t ggml_type_size(int type) { abort(); }
size_t ggml_row_size(int type, long long count) {
    switch (type) {
SIZES
        default: abort();
    }
}
const char * ggml_type_name(int type) { abort(); }
"""
SIZES = "\n".join(f"        case {int(kind)}: return count / {elements} * {size};" for kind, (elements, size) in gguf.GGML_QUANT_SIZES.items())


def reference_quantizer():
    """`ggml-quants.c` of the llama.cpp in a package, compiled with one rounding per operation."""
    folder = Path(tempfile.mkdtemp())
    source = llama_cpp.source(folder, ["ggml/include/", "ggml/src/ggml-"]) / "ggml"
    (folder / "stubs.c").write_text(STUBS.replace("SIZES", SIZES))
    files = [source / "src/ggml-quants.c", folder / "stubs.c"]
    subprocess.run(["cc", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-w", f"-I{source}/include", f"-I{source}/src", *files, "-lm", "-o", folder / "quants.so"], check=True)
    library = ctypes.CDLL(str(folder / "quants.so"))
    for kind in (Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ1_S):
        library.iq2xs_init_impl(int(kind))
    for size in (256, 512):
        library.iq3xs_init_impl(size)
    return library


def quantized(random):
    values = random.normal(0, 0.02, (12, 256)).astype(np.float32)
    values[1] = 0
    values[2] *= 1e-6
    values[3] *= 1e5
    values[4, 10] = 3.0
    values[5] = np.abs(values[5])
    values[6] = 0.125
    values[7] = np.tile(np.arange(-8, 8, dtype=np.float32), 16)
    found = {"values": values}
    for kind in (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1):
        found[kind.name] = gguf.quantize(values, kind)
    library = reference_quantizer()
    pointer = lambda array, to: array.ctypes.data_as(ctypes.POINTER(to))
    # With other row lengths too, because types with blocks of 32 use the whole row. A few columns have a
    # thousandfold importance, one has none.
    columns = 768
    importance = np.random.default_rng(2).lognormal(0, 2, columns).astype(np.float32)
    importance[7], importance[256:272] = 0, 0
    found["importance"] = importance

    def encoded(kind, columns, importance):
        """Blocks of all values as `llama-quantize` writes them, in rows of `columns` values."""
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = np.zeros(values.size // elements * size, dtype=np.uint8)
        function = getattr(library, f"quantize_{kind.name.lower().replace('_k', '_K')}")
        sizes = ctypes.c_int64(values.size // columns), ctypes.c_int64(columns)
        function(pointer(values, ctypes.c_float), pointer(blocks, ctypes.c_uint8), *sizes, importance)
        return blocks

    for kind in READ + LATER:
        found[f"{kind.name} by importance"] = encoded(kind, columns, pointer(importance, ctypes.c_float))
    for kind in [kind for kind in [Type.Q4_K, Type.Q5_K, Type.Q6_K, *LATER] if kind not in WEIGHTED]:
        found[kind.name] = encoded(kind, 256, None)
    save_file(found, FOLDER / "quantized.safetensors")


# Architectures whose query and key rows the converter permutes.
INTERLEAVED = ("llama", "granite")
# Architectures with sliding windows, the first three with the default pattern.
WINDOWED = ("gemma2", "gemma3", "gpt-oss", "olmo2", "cohere2")


def llama3_factors(scaling, theta, width):
    factors = []
    for pair in range(0, width, 2):
        wavelength = 2 * math.pi * theta ** (pair / width)
        original, low, high = (scaling[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(scaling["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def stacked(tensors, experts):
    """The converter's fusion of experts, which also drops the axis of a matrix with one row."""
    joined = {}
    for name, tensor in tensors.items():
        before, _, rest = name.partition(".experts.")
        if not rest:
            joined[name] = tensor.squeeze() if name.endswith("shared_expert_gate.weight") else tensor
        elif rest.startswith("0."):
            part = rest.removeprefix("0.")
            joined[f"{before}.experts.{part}"] = np.stack([tensors[f"{before}.experts.{expert}.{part}"] for expert in range(experts)])
    return joined


def separated(tensors):
    """The converter's names and layout of the experts of gpt-oss: columns of gate and up alternate in checkpoints."""
    parts = {}
    for name, tensor in tensors.items():
        end, rows = ("bias", tensor) if name.endswith("_bias") else ("weight", tensor.swapaxes(1, 2) if tensor.ndim == 3 else tensor)
        module = name.removesuffix("_bias")
        if ".gate_up_proj" in name:
            parts |= {f"{module.replace('gate_up', part)}.{end}": rows[:, number::2] for number, part in enumerate(("gate", "up"))}
        elif ".experts." in name:
            parts[f"{module}.{end}"] = rows
        else:
            parts[f"{name}.weight" if name.endswith(".sinks") else name] = tensor
    return parts


def absorbed(tensors, config):
    """The converter's split of the projection from latent vectors into the transposed one of keys, and that of values."""
    parts = {}
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            keys, values = np.split(tensor.reshape(config["num_attention_heads"], -1, tensor.shape[1]), [config["qk_nope_head_dim"]], axis=1)
            parts |= {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): values}
        else:
            parts[name] = tensor
    return parts


def write_model(path, architecture, config, tensors, vocabulary=None):
    writer = gguf.GGUFWriter(path, architecture)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rank = config.get("kv_lora_rank")
    writer.add_type("model")
    writer.add_name("A tiny model")
    writer.add_license("apache-2.0")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    if architecture == "lfm2":
        groups = [groups if kind == "full_attention" else 0 for kind in config["layer_types"]]
        writer.add_shortconv_l_cache(config["conv_L_cache"])
        tensors = {name: tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor for name, tensor in tensors.items()}
    writer.add_head_count_kv(1 if rank else groups)
    if epsilon := config.get("rms_norm_eps") or config.get("norm_eps"):
        writer.add_layer_norm_rms_eps(epsilon)
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps") or config["norm_epsilon"])
    scaling = config.get("rope_scaling") or {}
    if alpha := scaling.get("alpha"):
        writer.add_rope_freq_base(config["rope_theta"] * alpha ** (width / (width - 2)))
    else:
        writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(0)
    writer.add_quantization_version(2)
    if architecture in INTERLEAVED or "partial_rotary_factor" in config:
        writer.add_rope_dimension_count(int(width * config.get("partial_rotary_factor", 1.0)))
    if rank:
        rotary = config["qk_rope_head_dim"]
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rotary)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rotary)
        tensors = absorbed(tensors, config)
    elif config.get("head_dim"):
        writer.add_key_length(width)
        writer.add_value_length(width)
    if architecture in WINDOWED and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        if architecture in WINDOWED[3:]:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        if config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    experts = next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)), None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if inner := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(inner)
        if architecture in ("gpt-oss", "minimax-m2"):
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        if architecture == "minimax-m2":
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if architecture in ("deepseek2", "glm4moe"):
            writer.add_expert_shared_count(config["n_shared_experts"])
            writer.add_leading_dense_block_count(config["first_k_dense_replace"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config["routed_scaling_factor"])
            writer.add_expert_weights_norm(config["norm_topk_prob"])
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])
        if inner := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(inner)
        tensors = separated(tensors) if architecture == "gpt-oss" else stacked(tensors, experts)
    match scaling.get("rope_type", scaling.get("type")):
        case "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(scaling["factor"])
        case "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(scaling["factor"])
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
            if scale := scaling.get("mscale_all_dim"):
                writer.add_rope_scaling_yarn_log_mul(0.1 * scale)
        case "llama3":
            writer.add_tensor("rope_freqs.weight", llama3_factors(scaling, config["rope_theta"], width))
    for name in ("bos", "eos", "pad"):
        if (token := config.get(f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    if vocabulary:
        vocabulary(writer)
    names = gguf.get_tensor_name_map({name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if architecture in INTERLEAVED and name.split(".")[-2] in ("q_proj", "k_proj"):
            tensor = llama_cpp.interleaved(tensor, heads if "q_proj" in name else groups)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        there = names.get_name(name.replace("_correction_bias", "_correction.bias"), try_suffixes=(".weight", ".bias"))
        writer.add_tensor(there, np.ascontiguousarray(tensor))
    llama_cpp.finish(writer)


def source(name):
    """The tensors of a family, which are those of tests/golden/models or changed ones next to the GGUF file."""
    tensors = load_file(MODELS / SOURCES.get(name, name) / "model.safetensors")
    if name in OTHER_TENSORS:
        tensors = changed(name, tensors)
        save_file(tensors, FOLDER / f"{name}.safetensors")
    return tensors


# Arguments: the folder of llama.cpp, that of the model, and the file; a fourth one for configurations to which
# transformers must not add its defaults.
CONVERT = """
import json
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import gguf
import conversion
folder, out = map(Path, sys.argv[2:4])
if sys.argv[4:]:
    conversion.ModelBase.load_hparams = staticmethod(lambda folder, *_, **__: json.loads((folder / "config.json").read_text()))
hparams = conversion.ModelBase.load_hparams(folder, False)
model = conversion.get_model_class(hparams["architectures"][0])
model.set_vocab = lambda self: gguf.SpecialVocab(folder, load_merges=False).add_to_gguf(self.gguf_writer)
model.no_mtp = True
model(folder, gguf.LlamaFileType.ALL_F32, out, model_name="A tiny model").write()
"""


def convert(path, config, tensors, *options):
    """Writes a file by llama.cpp's converter, without a vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        source, model = llama_cpp.source(folder, ["conversion/", "gguf-py/"]), Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
        (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        save_file(tensors, model / "model.safetensors")
        subprocess.run([sys.executable, "-c", CONVERT, source, model, path, *options], check=True)


def families():
    for name, architecture, changes in FAMILIES:
        if ONLY and not any(text in name for text in ONLY):
            continue
        folder = MODELS / SOURCES.get(name, name)
        # Families that transformers 4 does not know have only the configuration of the current one.
        older = folder / "config-4.json"
        config = json.loads((older if older.exists() else folder / "config.json").read_text())
        changes = dict(changes)
        if original := changes.pop("original_max_position_embeddings", None):
            config["rope_scaling"]["original_max_position_embeddings"] = original
        config = {key: value for key, value in {**config, **changes}.items() if value is not ABSENT}
        if architecture:
            write_model(FOLDER / f"{name}.gguf", architecture, config, source(name))
        else:
            convert(FOLDER / f"{name}.gguf", config, source(name), *([] if older.exists() else ["as is"]))
        own = {key: value for key, value in config.items() if key not in CONVERTER_KEYS}
        (FOLDER / f"{name}.json").write_text(json.dumps(own, indent=2) + "\n")


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
# From the tokenizer.json of GPT-2, SmolLM2, Llama 3, Qwen 2.5 and 3.5, Mistral Nemo, gpt-oss and DeepSeek-V3.
PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": CONTRACTIONS + "|" + BEFORE + r"\p{L}+|\p{N}{1,3}" + END,
    "qwen2": CONTRACTIONS + "|" + BEFORE + r"\p{L}+|\p{N}" + END,
    "qwen35": CONTRACTIONS + "|" + BEFORE + r"[\p{L}\p{M}]+|\p{N}" + END.replace(r"\p{L}", r"\p{L}\p{M}"),
    "tekken": f"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*" + r"|\p{N}" + END.replace(r"[\r\n]*", r"[\r\n/]*"),
    "gpt-4o": f"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?" + r"|\p{N}{1,3}" + END.replace(r"[\r\n]*", r"[\r\n/]*"),
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ],
}
TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\n\tand\r\na tab   ",
    "I'LL SEE THEY'RE naïve cafe\u0301 déjà vu, 3.14159 ÷ 2 = ½",
    "你好，世界！ こんにちは 안녕 🙂👍🏽",
    "<|im_start|>user\nfn main() { println!(\"{}\", 0xFF); }<|im_end|>",
    "http://example.org/a/b//c?x=1&y=2 //// CamelCaseWords HTTPServer",
    "",
]


def tiny(tokens):
    """A model with one layer for a vocabulary."""
    random = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (tokens, 8), "model.norm.weight": (8,)}
    layer = {"input_layernorm": (8,), "post_attention_layernorm": (8,), "mlp.gate_proj": (8, 8), "mlp.up_proj": (8, 8), "mlp.down_proj": (8, 8)}
    layer |= {f"self_attn.{part}_proj": (8, 8) for part in "qkvo"}
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    config = {"vocab_size": tokens, "max_position_embeddings": 64, "hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    return config, {name: random.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


def corpus():
    return [(ROOT / "LICENSE").read_text(), *TEXTS * 20]


def bytes_tokenizer(name):
    tokenizer = Tokenizer(models.BPE(ignore_merges=name in ("llama-bpe", "tekken")))
    if name in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    if PATTERNS[name]:
        patterns = PATTERNS[name] if isinstance(PATTERNS[name], list) else [PATTERNS[name]]
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    elif name == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|im_start|>", "<|im_end|>"])
    if name in ("llama-bpe", "tekken"):
        first = tokenizer.token_to_id("<|begin_of_text|>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1", special_tokens=[("<|begin_of_text|>", first)])
    return tokenizer


def pieces_tokenizer():
    """SentencePiece BPE as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    start = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=start, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator([word for text in corpus() for word in text.split()], trainer)
    rest = json.loads(tokenizer.to_str())
    # These are special tokens without a text.
    rest["added_tokens"] = [token for token in rest["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(rest))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return tokenizer


def tokenizers():
    expected = {"texts": TEXTS, "tokens": {}}
    for name in [*PATTERNS, "pieces"]:
        tokenizer = pieces_tokenizer() if name == "pieces" else bytes_tokenizer(name)
        described = json.loads(tokenizer.to_str())
        ids = tokenizer.get_vocab()
        tokens = sorted(ids, key=ids.get)
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
        special = {token["id"] for token in described["added_tokens"]}

        def vocabulary(writer):
            # The embedding table has more rows than tokens.
            padding = [f"[PAD{len(tokens) + more}]" for more in range(3)]
            if name == "pieces":
                writer.add_tokenizer_model("llama")
                order = {}
                for rank, merge in enumerate(merges):
                    order.setdefault(merge.replace(" ", ""), rank)
                writer.add_token_scores([-float(order.get(token, 10000 + number)) for number, token in enumerate(tokens)] + [0.0] * 3)
                writer.add_unk_token_id(0)
                kinds = [2 if number == 0 else 3 if number in special else 6 if number < 259 else 1 for number in range(len(tokens))]
                writer.add_add_bos_token(True)
            else:
                writer.add_tokenizer_model("gpt2")
                writer.add_tokenizer_pre(name)
                writer.add_token_merges(merges)
                kinds = [3 if number in special else 1 for number in range(len(tokens))]
            writer.add_token_list(tokens + padding)
            writer.add_token_types(kinds + [5] * 3)
            writer.add_bos_token_id(1 if name == "pieces" else ids["<|begin_of_text|>"])
            writer.add_eos_token_id(2 if name == "pieces" else ids["<|im_end|>"])
            writer.add_chat_template("{{ messages }}")

        config, tensors = tiny(len(tokens) + 3)
        write_model(FOLDER / f"tokenizer-{name}.gguf", "llama", config, tensors, vocabulary)
        expected["tokens"][name] = [tokenizer.encode(text).ids for text in TEXTS]
    (FOLDER / "tokens.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n")


def seeds(random):
    """Small seed files for the fuzzer."""
    folder = ROOT / "fuzz/corpus/gguf"
    folder.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(folder / "seed-blocks", "none")
    for kind in READ + LATER:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        writer.add_tensor(kind.name, random.integers(0, 256, (1, size), dtype=np.uint8), raw_dtype=kind)
    llama_cpp.finish(writer)

    def vocabulary(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "b", "ab", "<s>"])
        writer.add_token_types([1, 1, 1, 3])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(3)

    config, tensors = tiny(4)
    write_model(folder / "seed-llama", "llama", config, tensors, vocabulary)
    write_model(folder / "seed-qwen2", "qwen2", config | {"head_dim": 4}, tensors)


FOLDER.mkdir(parents=True, exist_ok=True)
families()
if not ONLY:
    blocks(np.random.default_rng(0))
    quantized(np.random.default_rng(1))
    tokenizers()
    seeds(np.random.default_rng(2))
