"""Write tests/golden/training/losses.safetensors: losses and gradients of trl, sentence-transformers and PyTorch.

    scripts/goldens losses

- "contrastive/CASE/": "embeddings", "temperature", "loss" and "gradient" of MultipleNegativesRankingLoss, in which
  rows are the texts, then those that match them, then hard negatives if the name contains "negatives". The loss is
  symmetric if the name contains "symmetric".
- "divergence/CASE/": logits of "student" and "teacher", "labels" (-100 without a loss), "temperature" and "mix",
  "loss" and "gradient" of generalized_jsd_loss of GKDTrainer, with the mean over the labelled rows.
- "completion/": "logits" and "labels", "loss" and "gradient" of the cross-entropy of transformers over the tokens of a
  completion: labels are -100 outside of the completion, as SFTTrainer prepares them, and padded by trl's collator.
"""

import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.experimental.gkd import GKDTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from lib import GOLDEN

torch.set_num_threads(1)
torch.manual_seed(5)


class Embeddings(torch.nn.Module):
    """A model whose features are the embeddings."""

    def forward(self, features):
        return {"sentence_embedding": features["rows"]}


def contrastive(tensors):
    for texts, symmetric, temperature in [(2, False, 0.05), (2, True, 0.2), (3, False, 0.1), (3, True, 1.0)]:
        name = f"contrastive/{'symmetric' if symmetric else 'forward'}{'-negatives' if texts == 3 else ''}"
        rows = torch.randn(texts * 4, 6, requires_grad=True)
        options = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"} if symmetric else {}
        loss = MultipleNegativesRankingLoss(Embeddings(), scale=1 / temperature, **options)
        value = loss([{"rows": part} for part in rows.chunk(texts)], None)
        value.backward()
        found = {"embeddings": rows, "temperature": torch.tensor([temperature]), "loss": value.reshape(1), "gradient": rows.grad}
        tensors.update({f"{name}/{key}": tensor for key, tensor in found.items()})


def divergences(tensors):
    labels = torch.tensor([[-100, -100, 3, 4, 1], [-100, 2, 2, -100, -100]])
    for name, mix, temperature in [("forward", 0.0, 1.0), ("reverse", 1.0, 1.0), ("half", 0.5, 1.0), ("quarter", 0.25, 2.0)]:
        student, teacher = (2 * torch.randn(2, 5, 7) for _ in range(2))
        student.requires_grad_()
        value = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=mix, temperature=temperature)
        value.backward()
        numbers = {"temperature": torch.tensor([temperature]), "mix": torch.tensor([mix]), "loss": value.reshape(1)}
        all_tensors = {"student": student, "teacher": teacher, "labels": labels, "gradient": student.grad, **numbers}
        tensors.update({f"divergence/{name}/{key}": tensor for key, tensor in all_tensors.items()})


def completion(tensors):
    samples = [([1, 5, 6, 2, 3], 2), ([1, 4, 2], 1)]
    examples = [{"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]} for ids, prompt in samples]
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(examples)
    logits = torch.randn(2, 5, 7, requires_grad=True)
    value = ForCausalLMLoss(logits, batch["labels"], vocab_size=7)
    value.backward()
    found = {"input_ids": batch["input_ids"], "labels": batch["labels"], "logits": logits, "loss": value.reshape(1), "gradient": logits.grad}
    tensors.update({f"completion/{key}": tensor for key, tensor in found.items()})


def main():
    tensors = {}
    contrastive(tensors)
    divergences(tensors)
    completion(tensors)
    save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, GOLDEN / "training" / "losses.safetensors")


if __name__ == "__main__":
    main()
