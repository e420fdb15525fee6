"""Acceptance of draft tokens: greedy, and speculative sampling that keeps the target's distribution.

Plain torch functions without state, data-dependent shapes or reads of the device: inductor fuses them.
"""

import torch
from torch import Tensor

ARGMAX_CHUNKS = 64


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token, the first of equals; [..., V] to [...] int64.

    It looks for the best chunk of the vocabulary first, by value alone: on a GPU a row of argmax over all of it is one
    slow program.
    """
    vocab = logits.shape[-1]
    width = -(-vocab // ARGMAX_CHUNKS)
    padded = torch.nn.functional.pad(logits, (0, width * ARGMAX_CHUNKS - vocab), value=float("-inf"))
    chunks = padded.unflatten(-1, (ARGMAX_CHUNKS, width))
    chunk = chunks.amax(-1).argmax(-1, keepdim=True)
    token = chunks.take_along_dim(chunk[..., None], -2)[..., 0, :].argmax(-1, keepdim=True)
    return (chunk * width + token)[..., 0]


def accept_greedy(draft_tokens: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of the draft that equals the target's greedy choice (DESIGN step 5).

    Args:
        draft_tokens: [B, gamma] int64.
        target_logits: [B, gamma + 1, V]; slot i is the target's opinion after draft token i - 1.

    Returns:
        accepted: [B] int32, from 0 to gamma.
        tokens: [B, gamma + 1] int64, the target's choice at every slot. Entries up to `accepted` are the new tokens
            (below it they equal the draft's); later entries have no meaning.
    """
    tokens = greedy(target_logits)
    matches = (draft_tokens == tokens[:, :-1]).int()
    return matches.cumprod(1).sum(1, dtype=torch.int32), tokens


def process_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, truncate: bool) -> Tensor:
    """Probabilities after temperature, top-k and top-p, in transformers' order and with its treatment of ties.

    Args:
        logits: [B, ..., V], any float dtype.
        temperature: [B] or scalar, float > 0.
        top_k: [B] or scalar, int; 0 keeps every token.
        top_p: [B] or scalar, float in (0, 1]; 1 keeps every token. At least one token is always kept.
        truncate: False skips the sort, for when no row uses top_k or top_p (both are then ignored).

    Returns:
        [B, ..., V] fp32.
    """

    def per_row(setting: Tensor) -> Tensor:
        return setting.reshape(-1, *[1] * (logits.dim() - 1))

    logits = logits.float() / per_row(temperature.float())
    if not truncate:
        return logits.softmax(-1)
    vocab = logits.shape[-1]
    ordered, order = logits.sort(-1)
    kept = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab).long()
    first_kept = (vocab - per_row(kept)).expand(*logits.shape[:-1], 1)
    ordered = ordered.masked_fill(ordered < ordered.gather(-1, first_kept), float("-inf"))  # keeps the k-th's equals
    removed = ordered.softmax(-1).cumsum(-1) <= 1 - per_row(top_p.float())
    removed[..., -1] = False
    ordered = ordered.masked_fill(removed, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered.softmax(-1))


_LOW_32 = 0xFFFFFFFF


def _multiply_32(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit numbers, without passing int64's range."""
    upper, lower = (a >> 16) * b, (a & 0xFFFF) * b
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _LOW_32


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four random words from a key and a counter, 32-bit words in int64."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = _multiply_32(0xD2511F53, c0)
        high1, low1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW_32, (k1 + 0xBB67AE85) & _LOW_32
    return c0, c1, c2, c3


def uniform(seed: Tensor, stream: Tensor, step: Tensor, slots: int) -> Tensor:
    """Random numbers that depend on (seed, stream, step, slot) alone: no state, equal on every device and batch size.

    Args:
        seed, stream: [B] int64, of which all 64 bits count.
        step: scalar int64 tensor, of which the low 32 bits count.
        slots: how many numbers for each row.

    Returns:
        [B, slots] fp32 in [0, 1), multiples of 2^-24.
    """
    seed, stream = seed[:, None], stream[:, None]
    slot = torch.arange(slots, device=seed.device)
    key = (seed & _LOW_32, (seed >> 32) & _LOW_32)
    word = philox(key, (step & _LOW_32, slot, stream & _LOW_32, (stream >> 32) & _LOW_32))[0]
    return (word >> 8).float() * 2.0**-24


def sample(probs: Tensor, u: Tensor) -> Tensor:
    """Draw from (unnormalised) probabilities by inverting their cumulative sum.

    Args:
        probs: [..., V] fp32, >= 0.
        u: [...] fp32 in [0, 1).

    Returns:
        [...] int64; never a token of probability 0, whatever the rounding.
    """
    vocab = probs.shape[-1]
    token = torch.arange(vocab, device=probs.device)
    cumulative = probs.cumsum(-1)
    possible = probs > 0
    reached = possible & (cumulative > u[..., None] * cumulative[..., -1:])
    first = torch.where(reached, token, vocab).amin(-1)
    last_possible = torch.where(possible, token, 0).amax(-1)  # for when rounding lets no token be reached
    return torch.minimum(first, last_possible)


def accept_sampling(
    draft_tokens: Tensor, draft_probs: Tensor, target_probs: Tensor, u_accept: Tensor, u_resample: Tensor
) -> tuple[Tensor, Tensor]:
    """Speculative sampling (arXiv 2211.17192): the tokens kept are distributed as the target's own.

    Args:
        draft_tokens: [B, gamma] int64, drawn from draft_probs.
        draft_probs: [B, gamma, V] fp32, the processed distributions that the draft tokens were drawn from.
        target_probs: [B, gamma + 1, V] fp32, processed in the same way.
        u_accept: [B, gamma] fp32 in [0, 1).
        u_resample: [B] fp32 in [0, 1), independent of u_accept and of the draft's own draws.

    Returns:
        accepted: [B] int32, from 0 to gamma.
        tokens: [B, gamma + 1] int64: the accepted draft tokens, then one from the target; later entries mean nothing.
    """
    gamma = draft_tokens.shape[1]
    chosen = draft_tokens[..., None]
    p = target_probs[:, :-1].gather(-1, chosen)[..., 0]
    q = draft_probs.gather(-1, chosen)[..., 0]
    accepted = (u_accept * q < p).int().cumprod(1).sum(1, dtype=torch.int32)

    def at(probs: Tensor, slot: Tensor) -> Tensor:
        return probs.gather(1, slot.long()[:, None, None].expand(-1, 1, probs.shape[-1]))[:, 0]

    target = at(target_probs, accepted)
    residual = (target - at(draft_probs, accepted.clamp(max=gamma - 1))).clamp(min=0)
    # After a full acceptance there is nothing to subtract; nor where rounding left no residual.
    use_target = (accepted == gamma)[:, None] | (residual.sum(-1, keepdim=True) == 0)
    last = sample(torch.where(use_target, target, residual), u_resample)
    kept = torch.arange(gamma, device=last.device) < accepted[:, None]
    tokens = torch.cat((torch.where(kept, draft_tokens, last[:, None]), last[:, None]), 1)
    return accepted, tokens
