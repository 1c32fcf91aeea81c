"""Write tests/golden/exported: small models with random weights, as written by PyTorch's exporter.

BERT and Llama with `scaled_dot_product_attention`, GPT-2 with decomposed attention; one layer with two heads
each, both input sizes symbolic. Qwen2 has two query heads for each key head, GPT-NeoX rotates half of each head,
and ViT has a class token. tests/it/onnx_lift runs them in the built-in executor and in ONNX Runtime, and counts
the resulting ops.
"""


import onnx
import torch
import transformers

from lib import GOLDEN

FOLDER = GOLDEN / "exported"
TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}


IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16)


class Hidden(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


class ClassToken(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values):
        return self.model(pixel_values=pixel_values).last_hidden_state[:, 0]


def export(name, model):
    axes = {name: {0: "batch", 1: "sequence"} for name in ["input_ids", "attention_mask"]}
    write(name, Hidden(model), (TOKENS, MASK), axes)


def write(name, module, inputs, axes):
    path = FOLDER / f"{name}.onnx"
    names = list(axes)
    torch.onnx.export(module.eval(), inputs, path, input_names=names, output_names=["y"], dynamo=False, dynamic_axes=axes, opset_version=17)
    onnx.checker.check_model(onnx.load(path))
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def main():
    FOLDER.mkdir(exist_ok=True)
    torch.manual_seed(0)
    export("bert", transformers.BertModel(transformers.BertConfig(**SIZES, attn_implementation="sdpa")))
    export("llama", transformers.LlamaModel(transformers.LlamaConfig(**SIZES, attn_implementation="sdpa", use_cache=False)))
    own = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 24, "n_positions": 64}
    export("gpt2", transformers.GPT2Model(transformers.GPT2Config(**own, attn_implementation="eager", use_cache=False)))
    shared = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    export("qwen2", transformers.Qwen2Model(transformers.Qwen2Config(**shared, attn_implementation="sdpa")))
    neox = transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5, use_cache=False, attn_implementation="sdpa")
    export("gpt_neox", transformers.GPTNeoXModel(neox))
    image = {key: SIZES[key] for key in ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"]}
    vit = transformers.ViTModel(transformers.ViTConfig(**image, image_size=16, patch_size=4, attn_implementation="sdpa"), add_pooling_layer=False)
    write("vit", ClassToken(vit), (IMAGES,), {"pixel_values": {0: "batch"}})


main()
