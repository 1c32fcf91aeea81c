"""Write tests/golden/config-values.json: the values of config.json with which transformers loads the models of
tests/golden/models.

    scripts/goldens config-values

One model of each family gets each of the values below for each of these keys that its config.json has. The result
lists the families, and for each key the values that load in the same families, with a character for each family:
`1` if transformers loads the model and computes its outputs, `0` if it fails, and `-` if the family does not have
the key. Outputs of models without token ids are not computed.
"""

import copy
import json
import os
import resource
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

from lib import GOLDEN

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from lib.towers import model_class  # noqa: E402

SIZE = ["16", 1.5, True, -1, 0, [1], {}, None]
ACTIVATION = ["no_such_function", "swigluoai", "geglu", "laplace", 5, None]
FLAG = ["yes", 1, 0, None]
NUMBER = ["1e-5", 1, 0, True, [1], {}, None]
TOKEN = ["1", 1.5, True, {}, [1], -1, None, 100]
VALUES = {
    **dict.fromkeys("hidden_size num_attention_heads intermediate_size vocab_size num_key_value_heads head_dim num_hidden_layers".split(), SIZE),
    **dict.fromkeys("n_embd n_head n_layer d_model num_heads num_layers dim n_heads n_layers d_kv d_ff".split(), SIZE),
    **dict.fromkeys("max_position_embeddings num_experts num_local_experts num_experts_per_tok moe_intermediate_size".split(), SIZE),
    **dict.fromkeys("hidden_act hidden_activation activation_function activation dense_act_fn mlp_hidden_act".split(), ACTIVATION),
    **dict.fromkeys("dtype torch_dtype".split(), ["no_such_type", 5, "int8", "float8_e4m3fn", "torch.float32", "half", "bfloat16", None]),
    **dict.fromkeys("tie_word_embeddings attention_bias use_cache is_decoder mlp_bias use_bias".split(), FLAG),
    **dict.fromkeys("rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps attention_dropout initializer_range".split(), NUMBER),
    **dict.fromkeys("pad_token_id bos_token_id eos_token_id".split(), TOKEN),
    **dict.fromkeys("rope_parameters rope_scaling".split(), ["linear", 5, [1], None, {}, {"rope_theta": 100.0}]),
    "layer_types": [[], "full_attention", [1], None],
}
TYPES = ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "spiral", "mrope", "ntk", 5]
# Factors of the rotary position embedding.
FACTORS = [{}, {"factor": "2"}, {"factor": None}, {"factor": 2.0}]
for name in ("rope_parameters", "rope_scaling"):
    VALUES[name] = VALUES[name] + [{"rope_theta": 100.0, "rope_type": kind, **factor} for kind in TYPES for factor in FACTORS]
# Keys that every configuration may have.
COMMON = ["torch_dtype", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"]


def run(folder):
    config = json.loads((folder / "config.json").read_text())
    model, loading = model_class(config["architectures"][0]).from_pretrained(folder, output_loading_info=True)
    if loading["mismatched_keys"]:
        raise ValueError("weights do not fit")
    if model.main_input_name != "input_ids" or "vision" in config["model_type"]:
        return
    tokens = torch.ones(1, 4, dtype=torch.long)
    with torch.no_grad():
        model.eval()(input_ids=tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}))


def loads(base, config):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(base / "model.safetensors", folder)
        Path(folder, "config.json").write_text(json.dumps(config))
        try:
            run(Path(folder))
        except Exception:
            return False
        return True


def changed(config, key, value):
    config = copy.deepcopy(config)
    if key == "torch_dtype":
        config.pop("dtype", None)
    if key == "rope_scaling":
        config["rope_theta"] = (config.pop("rope_parameters", None) or {}).get("rope_theta", 100.0)
    config[key] = value
    return config


def has(config, key):
    if key == "rope_scaling":
        return has(config, "rope_parameters")
    if key == "rope_parameters":
        return key in config and not any(isinstance(value, dict) for value in config[key].values())
    return key in config or key in COMMON


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    # Wrong sizes must not exhaust the memory.
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    models = {}
    for file in sorted((GOLDEN / "models").glob("*/config.json")):
        config = json.loads(file.read_text())
        kind = config.get("model_type")
        if kind and kind not in models and config.get("architectures") and loads(file.parent, config):
            models[kind] = (file.parent, config)
    values = {}
    for key, candidates in VALUES.items():
        by_marks = {}
        for value in candidates:
            marks = "".join(str(int(loads(base, changed(config, key, value)))) if has(config, key) else "-" for base, config in models.values())
            by_marks.setdefault(marks, []).append(value)
        values[key] = [[group, marks] for marks, group in by_marks.items()]
    lines = [f"    {json.dumps(key)}: [\n" + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]" for key, rows in values.items()]
    names = json.dumps([[kind, base.name] for kind, (base, _) in models.items()])
    head = {"made_by": "scripts/goldens config-values", "versions": {"transformers": transformers.__version__}}
    text = json.dumps(head, indent=2)[:-2] + ',\n  "models": ' + names + ',\n  "values": {\n' + ",\n".join(lines) + "\n  }\n}\n"
    (GOLDEN / "config-values.json").write_text(text)


main()
