"""Write tests/golden/evaluation: small data sets, and the scores of the tiny models of tests/golden/models on
them.

    scripts/goldens evaluation

Tokenizers come from the library `tokenizers`, resized images from Pillow, outputs from transformers. Metrics are
computed here from their definitions, one sample at a time and without padding.
"""

import csv
import json
import math
import random
import shutil

import numpy
import torch
from PIL import Image
from lib.arrays import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, BertForSequenceClassification, LlamaForCausalLM, ResNetForImageClassification, PreTrainedTokenizerFast, ViTForImageClassification

from lib import GOLDEN

MODELS = GOLDEN / "models"
FOLDER = GOLDEN / "evaluation"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = "the cat sat on a mat and ate my old hat while rain fell in big wet drops over our small red barn".split()

torch.set_num_threads(1)


def word_pieces():
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS[:17])]
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special)
    # As in published files; it must not affect an evaluation.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9, pad_id=0, pad_token="[PAD]")
    tokenizer.save(str(FOLDER / "word-pieces.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(16)
    return tokenizer


def characters():
    tokens = ["<unk>", "<s>", "</s>", "▁", *LETTERS, ".", ",", "\n"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    tokenizer.save(str(FOLDER / "characters.json"))
    return tokenizer


def text(random, count):
    return " ".join(random.choice(WORDS) for _ in range(count))


def ranks(values):
    values = numpy.asarray(values)
    return numpy.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])


def classification(tokenizer, random):
    model = BertForSequenceClassification.from_pretrained(MODELS / "bert-sequence-classification").eval()

    def predict(sentence):
        return int(model(input_ids=torch.tensor([tokenizer.encode(sentence).ids])).logits.argmax())

    # Of many texts, some of each class that the model predicts: otherwise a constant would pass.
    texts = ["".join(random.choice(LETTERS[:12] + " ") for _ in range(random.randint(1, 40))).strip() or "a" for _ in range(600)]
    found = {c: [t for t in texts if predict(t) == c][:9] for c in range(3)}
    assert sum(len(some) > 3 for some in found.values()) > 1, {c: len(some) for c, some in found.items()}
    texts = [text(random, 14) + " and more", *(t for some in found.values() for t in some)]
    rows = [(t, random.randrange(3)) for t in texts]
    with open(FOLDER / "labelled.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "label"])
        # Class indices and class names, and a comma in a text.
        writer.writerows([n, t.replace(" and ", ", ") if n == 0 else t, label if n % 2 else f"LABEL_{label}"] for n, (t, label) in enumerate(rows))
    rows = list(csv.DictReader(open(FOLDER / "labelled.csv", newline="")))
    truth = [int(row["label"].removeprefix("LABEL_")) for row in rows]
    predicted = []
    for row in rows:
        predicted.append(predict(row["text"]))
    f1 = []
    for c in sorted({*truth, *predicted}):
        hits = sum(t == p == c for t, p in zip(truth, predicted))
        f1.append(2 * hits / (truth.count(c) + predicted.count(c)))
    return {"accuracy": sum(t == p for t, p in zip(truth, predicted)) / len(truth), "f1_macro": sum(f1) / len(f1), "samples": len(truth)}


def similarity(tokenizer, random):
    model = AutoModel.from_pretrained(MODELS / "sentence-mean").eval()
    rows = [(text(random, random.randint(1, 9)), text(random, random.randint(1, 9)), random.randint(0, 10) / 2) for _ in range(15)]
    # No header, no quoting, an additional column in some lines.
    lines = [f'{score}\t"{a}\t{b}' + ("\tmore" if n % 3 else "") for n, (a, b, score) in enumerate(rows)]
    (FOLDER / "pairs.tsv").write_text("\n".join(lines) + "\n")

    # As in sentence_bert_config.json of this model.
    tokenizer.enable_truncation(12)

    def embed(sentence):
        hidden = model(input_ids=torch.tensor([tokenizer.encode(sentence).ids])).last_hidden_state
        return hidden.mean(1)[0]

    cosines = [float(torch.cosine_similarity(embed('"' + a), embed(b), dim=0)) for a, b, _ in rows]
    scores = [score for _, _, score in rows]
    return {"spearman": float(numpy.corrcoef(ranks(cosines), ranks(scores))[0, 1]), "pearson": float(numpy.corrcoef(cosines, scores)[0, 1])}


def perplexity(tokenizer, random):
    model = LlamaForCausalLM.from_pretrained(MODELS / "llama").eval()
    book = "\n".join(text(random, 12) + "." for _ in range(8)) + "\n"
    (FOLDER / "book.txt").write_text(book)
    ids = tokenizer.encode(book, add_special_tokens=False).ids
    results = {"tokens": len(ids)}
    for name, (length, stride) in {"disjoint": (16, 15), "overlapping": (16, 4)}.items():
        losses, done, start = [], 0, 0
        while done < len(ids):
            window = ids[start : start + length - 1]
            logits = model(input_ids=torch.tensor([[1, *window]])).logits[0]
            for place in range(done - start, len(window)):
                losses.append(-float(logits[place].log_softmax(-1)[window[place]]))
            done, start = start + len(window), start + stride
        assert len(losses) == len(ids)
        results[name] = math.exp(sum(losses) / len(losses))
    return results


# Special tokens of a chat, after each role, and tools as JSON.
TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ message.role }}, {{ message['content'].strip() }}{{ eos_token }}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}assistant,{% endif %}"""


def chats(tokenizer, random):
    """Tokens of chats in transformers, and the perplexity with windows that do not cross chats."""
    model = LlamaForCausalLM.from_pretrained(MODELS / "llama").eval()
    said = lambda role: {"role": role, "content": f" {text(random, random.randint(2, 9))}"}
    rows = [{"messages": [said("system"), said("user"), said("assistant")][first:]} for first in (0, 1, 0, 2)]
    rows[1]["tools"] = [{"type": "function", "function": {"name": "rain", "parameters": {"wet": True, "a": [1.5, "ä"]}}}]
    (FOLDER / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (FOLDER / "chat_template.jinja").write_text(TEMPLATE)
    (FOLDER / "special.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}) + "\n")
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    tokens = [known.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows]
    losses = []
    for ids in tokens:
        for start in range(0, len(ids), 16):
            window = ids[start : start + 16]
            if len(window) > 1:
                logits = model(input_ids=torch.tensor([window])).logits[0, :-1]
                losses += torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none").tolist()
    return {"tokens": tokens, "perplexity": math.exp(sum(losses) / len(losses)), "count": len(losses)}


# The text of the assistant in generation blocks, without text between messages.
ANSWERS = """{{ bos_token }}{% for message in messages %}
{{ message.role }}, {% if message.role == 'assistant' %}
{% generation %}
{{ message.content }}{{ eos_token }}
{%- endgeneration %}
{% else %}
{{ message.content }}{{ eos_token }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}assistant, {% endif %}"""


def answers():
    """Tokens of chats with several answers, and masks of the text of the assistant."""
    letters = json.loads((FOLDER / "characters.json").read_text())
    # A token of the space before an answer and the first letter of it.
    letters["model"]["vocab"]["▁n"] = len(letters["model"]["vocab"])
    letters["model"]["merges"] = [["▁", "n"]]
    (FOLDER / "merged.json").write_text(json.dumps(letters, indent=1, ensure_ascii=False) + "\n")
    contents = ["a red hat", "no", "rain, rain.", "big drops", "nap", "our old barn", "not a mat fell over our small red barn"]
    roles = [["user", "assistant", "user", "assistant"], ["system", "user", "assistant"], ["user", "assistant"], ["assistant"]]
    rows, used = [], 0
    for row in roles:
        rows.append([{"role": role, "content": contents[(used + n) % len(contents)]} for n, role in enumerate(row)])
        used += len(row)
    (FOLDER / "answers.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    (FOLDER / "answers.jinja").write_text(ANSWERS)
    tokenizer = Tokenizer.from_file(str(FOLDER / "merged.json"))
    known = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=ANSWERS)
    marked = [known.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True) for row in rows]
    assert all(0 < sum(row["assistant_masks"]) < len(row["input_ids"]) for row in marked)
    return {"tokens": [row["input_ids"] for row in marked], "masks": [row["assistant_masks"] for row in marked]}


def picture(random, height, width):
    coarse = numpy.array([[[random.randrange(256) for _ in range(3)] for _ in range(4)] for _ in range(4)], dtype=numpy.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.BICUBIC)


def resized(image, processor):
    size, filter = processor["size"], {2: Image.BILINEAR, 3: Image.BICUBIC}[processor["resample"]]
    crop = None
    if "shortest_edge" in size:
        crop = size["shortest_edge"]
        edge = int(crop / processor["crop_pct"])
        width, height = image.size
        short, long = min(width, height), max(width, height)
        other = int(edge * long / short)
        image = image.resize((edge, other) if width <= height else (other, edge), filter)
    else:
        image = image.resize((size["width"], size["height"]), filter)
    pixels = numpy.asarray(image, dtype=numpy.float64).transpose(2, 0, 1)
    if crop:
        top, left = (pixels.shape[1] - crop) // 2, (pixels.shape[2] - crop) // 2
        pixels = pixels[:, top : top + crop, left : left + crop]
    mean, std = (numpy.array(processor[key])[:, None, None] for key in ("image_mean", "image_std"))
    return numpy.ascontiguousarray((pixels / 255 - mean) / std, dtype=numpy.float32)


def images(random):
    norm = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    processors = {
        "vit-image-classification": {"do_resize": True, "size": {"height": 12, "width": 12}, "resample": 2, **norm},
        "resnet-basic": {"feature_extractor_type": "ConvNextFeatureExtractor", "crop_pct": 0.875, "size": {"shortest_edge": 32}, "resample": 3, **norm},
    }
    paths = []
    for n in range(10):
        path = FOLDER / "images" / f"LABEL_{n % 5}" / f"{n}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(random, random.randint(36, 60), random.randint(36, 60)).save(path)
        paths.append(path)
    paths.sort()
    results, pixels = {}, {}
    for name, kind in {"vit-image-classification": ViTForImageClassification, "resnet-basic": ResNetForImageClassification}.items():
        model = kind.from_pretrained(MODELS / name).eval()
        (FOLDER / f"{name}.json").write_text(json.dumps(processors[name], indent=1) + "\n")
        pixels[name] = numpy.stack([resized(Image.open(path), processors[name]) for path in paths])
        predicted = model(pixel_values=torch.tensor(pixels[name])).logits.argmax(-1).tolist()
        results[name] = sum(p == int(path.parent.name[-1]) for p, path in zip(predicted, paths)) / len(paths)
    save_file(pixels, FOLDER / "pixels.safetensors")
    return results


@torch.no_grad()
def main():
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    source = random.Random(7)
    words, letters = word_pieces(), characters()
    expected = {
        "classification": classification(words, source),
        "similarity": similarity(words, source),
        "perplexity": perplexity(letters, source),
        "images": images(source),
        "chats": chats(letters, source),
        "answers": answers(),
    }
    rows = [[9, 1, 1, 1, 1, 1], [1, 1, 9, 1, 1, 1], [1, 1, 1, 1, 1, 200], [1, 1, 1, 1, 7, 1]]
    numpy.savez_compressed(FOLDER / "arrays.npz", x=numpy.array(rows, dtype=numpy.float64).reshape(4, 2, 3), labels=numpy.array([0, 2, 5, 3], dtype=numpy.int32))
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(json.dumps(expected, indent=1))


main()
