"""Reference: what layers with a recurrent state compute."""

import numpy as np

from pyggml.backends.reference.memory import Array, floats, stored
from pyggml.params import DeltaNetParams
from pyggml.tensor import Tensor


def ssm_conv(node: Tensor) -> Array:
    """dst[i, t, s] = sum over j of x[t + j, i, s] * kernel[j, i]"""
    x, kernel = (floats(t).astype(np.float64)[0] for t in node.src[:2])
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[-1], axis=-1)
    out: Array = np.einsum("sitj,ij->sti", windows, kernel[0])
    return out[None]


def gated_delta_net(node: Tensor) -> None:
    """Per token and head, with the state S [value channels, key channels]:

    S = S * exp(gate); S += outer((v - S k) * beta, k); out = S q / sqrt(n)
    """
    assert isinstance(node.params, DeltaNetParams)
    q, k, v, gate, beta, state = (floats(t).astype(np.float64) for t in node.src)
    n_seqs, n_tokens, n_head, n = v.shape
    # q and k: heads repeat one after another, sequences share theirs with their neighbours
    q, k = (np.tile(a, (1, 1, n_head // a.shape[2], 1)) for a in (q, k))
    q, k = (a.repeat(n_seqs // a.shape[0], 0) for a in (q, k))
    rows = stored(node)[0, 0]
    outputs = rows[: n_seqs * n_tokens].reshape(n_seqs, n_tokens, n_head, n)
    snapshots = rows[n_seqs * n_tokens :].reshape(-1, *state.shape)
    for t in range(n_tokens):
        state = state * np.exp(gate[:, t])[:, :, None, :]
        wrong = v[:, t] - np.einsum("shji,shi->shj", state, k[:, t])
        state = state + (wrong * beta[:, t])[..., None] * k[:, t][:, :, None, :]
        outputs[:, t] = np.einsum("shji,shi->shj", state, q[:, t]) / np.sqrt(n)
        if n_tokens - 1 - t < node.params.n_snapshots:
            snapshots[n_tokens - 1 - t] = state
