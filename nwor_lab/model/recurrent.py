# SPDX-License-Identifier: Apache-2.0
"""Bytes of a verify step over one layer's recurrent state (Mamba-2), whose drafts cannot be cut off like rows.

A request that verifies k drafts brings T = 1 + k tokens, of which 1 to T are kept. Three ways to come back to the state
after the last kept one, as S bytes of state and i bytes of one token's inputs (x, dt and B):

    way        verify                    after sampling
    snapshots  reads S, writes T S       nothing: the next step reads the snapshot that was kept
    commit     reads S, writes T i       reads S and the kept tokens' i, writes S
    replay     reads S + h i, writes T i nothing, or in a share of the steps writes S

`snapshots` is one state a draft. `commit` keeps one state and the inputs, and advances the state to what was accepted,
as vLLM's RecoverSSM does. `replay` is ReplaySSM (https://github.com/vllm-project/vllm/pull/49847): h kept inputs wait
beside the state, which is written only when they fill their ring. The convolution's state is left out.
"""

from dataclasses import dataclass

from nwor_lab.model.traffic import Moved

WAYS = ("snapshots", "commit", "replay")


@dataclass(frozen=True)
class RecurrentShape:
    """One Mamba-2 layer on one rank.

    Attributes:
        heads, head_dim, state_size: shape of the state.
        groups: of heads that share B.
        state_bytes: bytes an element of the state (fp32 by default).
        input_bytes: bytes an element of x and B; dt is fp32, one a head.
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int = 1
    state_bytes: int = 4
    input_bytes: int = 2

    @property
    def state(self) -> int:
        """Bytes of one state."""
        return self.heads * self.head_dim * self.state_size * self.state_bytes

    @property
    def inputs(self) -> int:
        """Bytes of one token's inputs, from which the state's next value follows."""
        return (self.heads * self.head_dim + self.groups * self.state_size) * self.input_bytes + 4 * self.heads


MAMBA_2 = RecurrentShape(heads=80, head_dim=64, state_size=128)
"""A layer of Mamba-2 of 2.7 billion parameters: 2 x 2,560 channels in heads of 64 (https://arxiv.org/abs/2405.21060)."""


def state_traffic(
    way: str, shape: RecurrentShape, k: int, accepted: int, history: float = 0, flushes: float = 0
) -> Moved:
    """Bytes that one request's verify step reads and writes of one layer's state and inputs; launches are not counted.

    Args:
        way: one of `WAYS`. k: drafts, of which `accepted` hold.
        history: kept inputs that wait beside the state before this step, `flushes`: share of the steps that write the
            state; of `replay` alone.

    Raises:
        ValueError: an unknown way, or more accepted than drafted.
    """
    if way not in WAYS:
        raise ValueError(f"{way!r} is no way to come back to a state; choose one of {', '.join(WAYS)}")
    if not 0 <= accepted <= k:
        raise ValueError(f"{accepted} accepted of {k} drafts")
    tokens, kept = 1 + k, 1 + accepted
    if way == "snapshots":
        return Moved(shape.state, tokens * shape.state)
    verify = Moved(shape.state, tokens * shape.inputs)
    if way == "commit":
        return verify + Moved(shape.state + kept * shape.inputs, shape.state)
    return verify + Moved(history * shape.inputs, flushes * shape.state)


def state_memory(way: str, shape: RecurrentShape, k: int, ring: int = 0) -> int:
    """Bytes that one request holds of one layer while k drafts are verified; `ring`: inputs kept by `replay` before."""
    if way == "snapshots":
        return (1 + k) * shape.state
    return shape.state + (1 + k + ring) * shape.inputs
