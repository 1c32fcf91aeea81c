"""Numbers that identify a tensor within a tolerance."""

import torch


def checksums(values):
    """The L2 norm, Σ x[i] · w(i) with w(i) = ((7919 i) mod 2003) / 2003 - 0.5, and the first four elements."""
    flat = values.detach().flatten().double()
    i = torch.arange(flat.numel(), dtype=torch.int64)
    weights = ((7919 * i) % 2003).double() / 2003 - 0.5
    return [flat.norm().item(), (flat * weights).sum().item(), *flat[:4].tolist()]
