"""Distillation in plain PyTorch with autocast, for comparison in scripts/gpu-check.

    gpu_peers.py make JOB FOLDER          write teacher, student and batch for compress, with random weights
    gpu_peers.py run JOB FOLDER DEVICE    print seconds per step, the first loss and the peak memory, as JSON

minilm: an encoder of six layers with width 384 is distilled to its layers 0, 2 and 4; 64 sequences of 128
tokens; KL divergence of the distributions over six classes plus the mean squared error of hidden states. llama:
12 layers with width 768 and 32,000 tokens are distilled to the even layers; 8 sequences of 512 tokens; KL
divergence of the distributions over the next token. AdamW, bf16 except for weights and optimizer.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

STEPS, WARM_UP = 8, 3
KINDS = {torch.float32: "F32", torch.int64: "I64"}


def save(path, tensors):
    header, begin, data = {}, 0, []
    for name, tensor in tensors.items():
        data.append(tensor.detach().cpu().contiguous().numpy().tobytes())
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, begin + len(data[-1])]}
        begin += len(data[-1])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class EncoderLayer(nn.Module):
    def __init__(self, width, inner, count):
        super().__init__()
        self.count = count
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        q, k, v = (heads(layer(x), self.count) for layer in (self.query, self.key, self.value))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(seen))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Encoder(nn.Module):
    WIDTH, INNER, HEADS, WORDS, PLACES, CLASSES = 384, 1536, 12, 30522, 512, 6
    NAMES = {
        "query": "attention.self.query", "key": "attention.self.key", "value": "attention.self.value", "out": "attention.output.dense",
        "norm1": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense", "norm2": "output.LayerNorm",
    }  # fmt: skip

    def __init__(self, layers):
        super().__init__()
        self.words, self.places, self.types = (nn.Embedding(count, self.WIDTH) for count in (self.WORDS, self.PLACES, 2))
        self.norm = nn.LayerNorm(self.WIDTH, 1e-12)
        self.layers = nn.ModuleList(EncoderLayer(self.WIDTH, self.INNER, self.HEADS) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(self.WIDTH, self.WIDTH), nn.Linear(self.WIDTH, self.CLASSES)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]] + self.types.weight[0]
        hidden = [self.norm(x)]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return self.classifier(torch.tanh(self.pooler(hidden[-1][:, 0]))), hidden[1:]

    def named(self):
        before = {"words": "word_embeddings", "places": "position_embeddings", "types": "token_type_embeddings", "norm": "LayerNorm"}
        for name, tensor in self.state_dict().items():
            first, *rest = name.split(".")
            if first == "layers":
                number, part, kind = rest
                name = f"bert.encoder.layer.{number}.{self.NAMES[part]}.{kind}"
            elif first in before:
                name = f"bert.embeddings.{before[first]}.{rest[0]}"
            elif first == "pooler":
                name = f"bert.pooler.dense.{rest[0]}"
            yield name, tensor

    def config(self):
        return {
            "architectures": ["BertForSequenceClassification"], "model_type": "bert", "hidden_size": self.WIDTH, "intermediate_size": self.INNER,
            "num_attention_heads": self.HEADS, "num_hidden_layers": len(self.layers), "vocab_size": self.WORDS, "type_vocab_size": 2,
            "max_position_embeddings": self.PLACES, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 0,
            "id2label": {str(i): str(i) for i in range(self.CLASSES)}, "label2id": {str(i): i for i in range(self.CLASSES)},
        }  # fmt: skip


class RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class DecoderLayer(nn.Module):
    def __init__(self, width, inner, count):
        super().__init__()
        self.count = count
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)

    def forward(self, x, turn):
        normed = self.norm1(x)
        q, k, v = (heads(layer(normed), self.count) for layer in (self.q, self.k, self.v))
        seen = functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    WIDTH, INNER, HEADS, WORDS = 768, 3072, 12, 32000
    NAMES = {
        "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
        "up": "mlp.up_proj", "down": "mlp.down_proj", "norm1": "input_layernorm", "norm2": "post_attention_layernorm",
    }  # fmt: skip

    def __init__(self, layers):
        super().__init__()
        self.words, self.head = nn.Embedding(self.WORDS, self.WIDTH), nn.Linear(self.WIDTH, self.WORDS, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(self.WIDTH, self.INNER, self.HEADS) for _ in range(layers))
        self.norm = RmsNorm(self.WIDTH)

    def forward(self, ids):
        size = self.WIDTH // self.HEADS
        rates = 10000.0 ** (-torch.arange(0, size, 2, device=ids.device) / size)
        angles = torch.outer(torch.arange(ids.shape[1], device=ids.device), rates).repeat(1, 2)
        cos, sin = angles.cos(), angles.sin()

        def turn(x):
            first, second = x.chunk(2, -1)
            return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)

        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, turn)
        return self.head(self.norm(x)), []

    def named(self):
        for name, tensor in self.state_dict().items():
            first, *rest = name.split(".")
            if first == "layers":
                number, part, kind = rest
                name = f"model.layers.{number}.{self.NAMES[part]}.{kind}"
            else:
                name = {"words": "model.embed_tokens.weight", "head": "lm_head.weight", "norm": "model.norm.weight"}[first]
            yield name, tensor

    def config(self):
        return {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": self.WIDTH, "intermediate_size": self.INNER,
            "num_attention_heads": self.HEADS, "num_key_value_heads": self.HEADS, "num_hidden_layers": len(self.layers), "vocab_size": self.WORDS,
            "max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        }  # fmt: skip


HIDDEN = [[0, 1], [1, 3], [2, 5]]
JOBS = {
    "minilm": (Encoder, 6, [0, 2, 4], (64, 128), f"losses: {{ soft: {{ temperature: 1 }}, hidden: {{ weight: 3, layers: {HIDDEN} }} }}"),
    "llama": (Decoder, 12, [0, 2, 4, 6, 8, 10], (8, 512), "losses: { soft: { temperature: 1 } }"),
}


def models(job):
    torch.manual_seed(0)
    kind, layers, taken, shape, _ = JOBS[job]
    teacher, student = kind(layers), kind(len(taken))
    for parameter in teacher.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
    state = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers":
            if int(parts[1]) not in taken:
                continue
            parts[1] = str(taken.index(int(parts[1])))
        state[".".join(parts)] = tensor.clone()
    student.load_state_dict(state)
    return teacher, student, torch.randint(1000, kind.WORDS - 1000, shape)


def make(job, folder):
    teacher, student, ids = models(job)
    for name, model in (("teacher", teacher), ("student", student)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        save(folder / name / "model.safetensors", dict(model.named()))
        (folder / name / "config.json").write_text(json.dumps(model.config()))
    save(folder / "batch.safetensors", {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    options = f"{JOBS[job][4]}, learning_rate: 5e-5, batch_size: {ids.shape[0]}, max_steps: {STEPS + 2}, clip_norm: 0, schedule: {{ kind: constant }}, precision: bf16"
    (folder / "options.json").write_text(json.dumps({"recipe": options, "samples": ids.shape[0], "tokens": ids.numel()}))


def run(job, device):
    teacher, student, ids = models(job)
    teacher, student, ids = teacher.to(device).eval().to(torch.bfloat16), student.to(device), ids.to(device)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-5, fused=device != "cpu")
    cuda = device != "cpu"

    def loss():
        with torch.no_grad():
            theirs, their_hidden = teacher(ids)
        with torch.autocast(device.split(":")[0], torch.bfloat16):
            ours, our_hidden = student(ids)
        ours, theirs = (logits.float().flatten(0, -2).log_softmax(-1) for logits in (ours, theirs))
        value = functional.kl_div(ours, theirs, reduction="batchmean", log_target=True)
        for own, other in HIDDEN if our_hidden else []:
            value = value + functional.mse_loss(our_hidden[own].float(), their_hidden[other].float())
        return value

    seconds, losses = [], []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    print(json.dumps({"seconds": statistics.median(seconds[WARM_UP:]), "first_loss": losses[0], "peak": peak, "by": f"torch {torch.__version__}"}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
    else:
        run(sys.argv[2], sys.argv[4])
