"""Write tests/golden/draft-head: an EAGLE-3 head of the golden Llama, as the package `speculators` writes and runs it.

    scripts/goldens draft-head

The folder has the head in the format of the package (config.json, model.safetensors), with random weights, and
outputs.safetensors: tokens, the attention mask and labels, the hidden states of the target that the head reads, the
logits of each step of training-time test, the loss (the sum over steps of the KL divergence from the target, restricted
to the tokens of the head, divided by the number of rows of the first step), and its gradients.
"""

import json

import torch
import transformers
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig

from lib import GOLDEN

FOLDER = GOLDEN / "draft-head"
TARGET = GOLDEN / "models" / "llama"
STEPS = 3
LAYERS = [0, 1, 2]
TOKENS = sorted({0, 2, 3, 5, 8, 13, 14, 15, 20, 21, 22, 30, 31, 33, 34, 40, 41, 45, 46, 47})

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


def head():
    layer = json.loads((TARGET / "config.json").read_text())
    layer |= {"num_hidden_layers": 1, "num_key_value_heads": 1}
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=transformers.LlamaConfig(**layer, attn_implementation="eager"),
        draft_vocab_size=len(TOKENS),
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="llama", architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(mean + 0.3 * torch.randn(parameter.shape, generator=generator))
        # A head has the embeddings of its target.
        model.embed_tokens.weight.copy_(load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"])
    known = torch.zeros(layer["vocab_size"], dtype=torch.bool)
    known[TOKENS] = True
    model.load_vocab_mappings(known, torch.tensor(TOKENS) - torch.arange(len(TOKENS)))
    # The package does not train the output head.
    model.lm_head.weight.requires_grad_(True)
    return model.eval()


def main():
    FOLDER.mkdir(exist_ok=True)
    model = head()
    model.save_pretrained(FOLDER)
    # The package adds its source.
    for file in FOLDER.glob("*.py"):
        file.unlink()
    target = transformers.AutoModelForCausalLM.from_pretrained(TARGET, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(11)
    count = 9
    ids = torch.randint(3, 48, (1, count), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    with torch.no_grad():
        outputs = target(ids, output_hidden_states=True)
        # The last hidden state of transformers is normalized, that of the package is not.
        hook = {}
        target.model.norm.register_forward_pre_hook(lambda _, inputs: hook.update(last=inputs[0]))
        target(ids)
        states = [outputs.hidden_states[0], outputs.hidden_states[1], hook["last"]]
    hidden = torch.cat(states, dim=-1)
    logits = []
    model.lm_head.register_forward_hook(lambda _, __, output: logits.append(output))
    # As the package aligns them: a row has a hidden state and the token after it.
    document = torch.zeros((1, count - 1), dtype=torch.long)
    model(hidden[:, :-1], ids[:, 1:], document, position_ids=torch.arange(1, count)[None], ttt_steps=STEPS)
    # The rows of the target that predict labelled tokens.
    rows = [at for at in range(count - 1) if labels[0, at + 1] != -100]
    restricted = outputs.logits[0][:, TOKENS].log_softmax(-1)
    loss = 0.0
    for step, values in enumerate(logits):
        pairs = [(at - 1 - step, at) for at in rows if at - 1 - step >= 0]
        ours, theirs = zip(*pairs)
        predicted = values[0, list(ours)].log_softmax(-1)
        loss = loss + torch.nn.functional.kl_div(predicted, restricted[list(theirs)], log_target=True, reduction="sum")
    first = sum(at >= 1 for at in rows)
    loss = loss / first
    loss.backward()
    names = [name for name, _ in model.named_parameters() if not name.startswith(("verifier", "embed_tokens"))]
    arrays = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "hidden_states": hidden, "loss": loss.detach().reshape(1)}
    arrays |= {f"logits.{step}": values for step, values in enumerate(logits)}
    arrays |= {f"gradient.{name}": model.get_parameter(name).grad for name in names}
    save_file({name: array.detach().contiguous() for name, array in arrays.items()}, FOLDER / "outputs.safetensors")
    print(loss.item(), [path.name for path in FOLDER.iterdir()])


main()
