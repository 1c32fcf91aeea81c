"""Write tests/golden/training: training of encoder-decoder models, by transformers and PyTorch in f32.

    scripts/goldens training

Models are those of tests/golden/models. CASE.safetensors has the samples as arrays: "input_ids" and
"attention_mask", or "input_features", and "labels" with -100 after the last token. Each case is STEPS steps of
AdamW with all samples in each step, without dropout, warm-up or clipping, and with weight decay for parameters
with two or more axes.

expected.json has for each case "losses", by name and step, and "weights": for each parameter, by its name in
model.safetensors, the checksums (lib/checksums.py) after the last step.

finetune-MODEL is trained on its labels, distill on another model: "soft" is the Kullback-Leibler divergence at
temperature 2, times 4, and "hard" the cross-entropy, both as means over the labeled tokens; "hidden" is the
mean over tokens and pairs of layers of the mean squared difference of layer outputs, separately for encoder and
decoder. Weights of the terms: TERMS.

contrastive.csv has pairs of texts with hard negatives, and contrastive.json for "pairs" and "negatives" the same
two keys for STEPS steps of SGD on all pairs with the loss of sentence-transformers at temperature TEMPERATURE,
whose texts have the tokens of evaluation/word-pieces.json.

letters.json is a tokenizer that appends an end token, and pairs.csv has texts for it. "pairs" in expected.json
has their tokens by the tokenizer of transformers, and the mean cross-entropy of the second texts, given the
first.
"""

import csv
import json
import random

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F

from lib import GOLDEN
from lib.checksums import checksums

FOLDER = GOLDEN / "training"
STEPS = 4
RATE = 3e-3
DECAY = 0.1
SGD_RATE = 0.1
TEMPERATURE = 0.5
TERMS = {"soft": 1.0, "hard": 0.5, "hidden": 0.01}

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def rows(rng, lengths, end, filling):
    """Padded rows of tokens with an end token."""
    width = max(lengths)
    return torch.tensor([[rng.randrange(3, 48) for _ in range(n - 1)] + [end] + [filling] * (width - n) for n in lengths])


def samples(name):
    rng = random.Random(f"training/{name}")
    # Encoder and decoder have the same length, so that padding masks can be confused.
    labels = rows(rng, (9, 4, 6, 2), 1, -100)
    if name.endswith("whisper"):
        features = torch.tensor([rng.gauss(0, 1) for _ in range(4 * 6 * 20)]).reshape(4, 6, 20)
        return {"input_features": features, "labels": labels}
    lengths = (3, 9, 5, 7)
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    return {"input_ids": rows(rng, lengths, 1, 0), "attention_mask": mask, "labels": labels}


def load(name):
    kind = getattr(transformers, json.loads((GOLDEN / "models" / name / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(GOLDEN / "models" / name, attn_implementation="eager", dtype=torch.float32).eval()


def run(model, inputs):
    """Logits, and the layer outputs of encoder and decoder."""
    seen, hooks = {"encoder": [], "decoder": []}, []
    for side in seen:
        stack = getattr(getattr(model, "model", model), side)
        for layer in getattr(stack, "block", None) or stack.layers:
            keep = lambda _module, _inputs, output, side=side: seen[side].append(output[0] if isinstance(output, tuple) else output)
            hooks.append(layer.register_forward_hook(keep))
    outputs = model(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs, seen


def spread(student, teacher):
    return [(layer, -(-(layer + 1) * teacher // student) - 1) for layer in range(student)]


def hidden(ours, theirs, masks):
    total, count = 0, 0
    for side, mask in masks.items():
        for a, b in spread(len(ours[side]), len(theirs[side])):
            total = total + (((ours[side][a] - theirs[side][b]) ** 2).mean(-1) * mask).sum()
            count += mask.sum()
    return total / count


def adamw(student):
    groups = [[p for p in student.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    return torch.optim.AdamW([{"params": p, "weight_decay": decay} for p, decay in zip(groups, (DECAY, 0.0))], lr=RATE)


def train(student, optimizer, losses_of, file):
    # Names in the file, before tensors are updated.
    stored = load_file(file)
    names = {}
    for name, parameter in student.named_parameters():
        found = [key for key, x in stored.items() if x.shape == parameter.shape and torch.equal(x, parameter.data)]
        assert len(found) == 1, (name, found)
        names[found[0]] = parameter
    curve = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = losses_of()
        sum((TERMS[name] if len(losses) > 1 else 1.0) * loss for name, loss in losses.items()).backward()
        curve.append({name: loss.item() for name, loss in losses.items()})
        optimizer.step()
    return {"losses": curve, "weights": {name: checksums(parameter) for name, parameter in sorted(names.items())}}


def finetune(name):
    model, inputs = load(name), samples(name)
    save_file(inputs, FOLDER / f"finetune-{name}.safetensors")
    return train(model, adamw(model), lambda: {"hard": model(**inputs, use_cache=False).loss}, GOLDEN / "models" / name / "model.safetensors")


def distill(student, teacher):
    model, other, inputs = load(student), load(teacher), samples(f"distill/{student}")
    save_file(inputs, FOLDER / "distill.safetensors")
    asked = inputs["labels"] != -100
    with torch.no_grad():
        theirs, beside = run(other, inputs)

    def losses():
        outputs, seen = run(model, inputs)
        ours, target = ((x.logits[asked] / 2.0).log_softmax(-1) for x in (outputs, theirs))
        masks = {"encoder": inputs["attention_mask"], "decoder": asked.long()}
        soft = F.kl_div(ours, target, log_target=True, reduction="batchmean") * 4.0
        return {"soft": soft, "hard": outputs.loss, "hidden": hidden(seen, beside, masks)}

    return train(model, adamw(model), losses, GOLDEN / "models" / student / "model.safetensors")


class Encoder(torch.nn.Module):
    """The embeddings of texts, normalized means of hidden states, as modules.json of the model specifies."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        mask = features["attention_mask"][..., None]
        hidden = self.model(**features).last_hidden_state * mask
        return {"sentence_embedding": F.normalize(hidden.sum(1) / mask.sum(1), dim=-1)}


TRIPLES = [
    ("the cat", "a cat sat", "the hat ate"),
    ("a hat ate", "the hat", "cat"),
    ("the mat", "on the mat", "a hat"),
    ("sat on", "sat", "ate"),
]


def contrastive(columns):
    file = GOLDEN / "models" / "sentence-mean" / "model.safetensors"
    model = transformers.AutoModel.from_pretrained(file.parent, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(GOLDEN / "evaluation" / "word-pieces.json"))
    # As in sentence_bert_config.json of this model.
    tokenizer.enable_truncation(12)
    tokenizer.enable_padding()

    def features(texts):
        encoded = tokenizer.encode_batch(texts)
        return {"input_ids": torch.tensor([text.ids for text in encoded]), "attention_mask": torch.tensor([text.attention_mask for text in encoded])}

    texts = [features(column) for column in list(zip(*TRIPLES))[:columns]]
    loss = MultipleNegativesRankingLoss(Encoder(model), scale=1 / TEMPERATURE)
    return train(model, torch.optim.SGD(model.parameters(), lr=SGD_RATE), lambda: {"contrastive": loss(texts, None)}, file)


PAIRS = [("a b c", "c b a"), ("the cat sat", "sat"), ("x", "x x x x x"), ("dog, cat", "a dog and a cat"), ("", "empty")]


def pairs(name):
    letters = {token: number for number, token in enumerate(["<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz "])}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(FOLDER / "letters.json"))
    with open(FOLDER / "pairs.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("source", "target"), *PAIRS])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(FOLDER / "letters.json"), pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    read = fast([source for source, _ in PAIRS], padding=True, return_tensors="pt")
    said = fast(text_target=[target for _, target in PAIRS], padding=True, return_tensors="pt")
    labels = said["input_ids"].masked_fill(said["attention_mask"] == 0, -100)
    with torch.no_grad():
        loss = load(name)(input_ids=read["input_ids"], attention_mask=read["attention_mask"], labels=labels).loss
    return {"input_ids": read["input_ids"].tolist(), "labels": labels.tolist(), "loss": loss.item()}


FOLDER.mkdir(exist_ok=True)
found = {f"finetune-{name}": finetune(name) for name in ("t5", "t5-gated", "mt5", "whisper")}
found["distill"] = distill("t5", "t5-gated")
found["pairs"] = pairs("t5")
with open(FOLDER / "contrastive.csv", "w", newline="") as file:
    csv.writer(file, lineterminator="\n").writerows([("query", "match", "other"), *TRIPLES])
sentences = {"pairs": contrastive(2), "negatives": contrastive(3)}
for name, cases in (("expected", found), ("contrastive", sentences)):
    lines = ",\n".join(f'"{name}": {json.dumps(case)}' for name, case in cases.items())
    (FOLDER / f"{name}.json").write_text(f"{{\n{lines}\n}}\n")
for name, case in {**found, **sentences}.items():
    print(name, case.get("losses") or case["loss"])
