# SPDX-License-Identifier: Apache-2.0
"""An auditor for a runner whose cache is there: what it audits, and the proof that it finds each kind of fault."""

from __future__ import annotations

from typing import Any

import torch

from .auditor import Auditor, auditor_of
from .marks import REJECTED, Batch, Outcome, Sample
from .pages import find_pages
from .perturb import Perturb
from .report import logger
from .settings import AUDIT, KINDS, Settings


def make_auditor(runner: Any, settings: Settings) -> Auditor:
    """An auditor for a runner that has its cache.

    Raises:
        RuntimeError: this engine cannot be audited, or the auditor does not find faults that it plants itself.
    """
    config = runner.vllm_config
    if why := _why_not(config):
        raise RuntimeError(f"kv audit: {why} cannot be audited; unset {AUDIT}")
    pages, left = find_pages(runner)
    if not pages:
        raise RuntimeError(f"kv audit: nothing to audit: {'; '.join(left) or 'no attention layers'}; unset {AUDIT}")
    rank = config.parallel_config.rank
    auditor = Auditor(
        settings,
        pages,
        config.scheduler_config.max_num_seqs,
        config.model_config.max_model_len,
        runner.kv_cache_config.num_blocks,
        adopts=config.kv_transfer_config is not None,
        rank=rank,
    )
    sampled = torch.int64 if config.use_v2_model_runner else torch.int32
    for index in range(len(pages)):
        self_check(auditor, index, sampled)
    auditor.reset()
    if settings.perturb:
        auditor.perturb = Perturb(auditor, settings.perturb)
    every = f"{settings.samples} slots" if settings.samples else "all slots"
    more = "".join(f"; not audited: {line}" for line in left)
    if settings.perturb:
        more = f"; plants faults: {dict(settings.perturb)}{more}"
    logger().info(
        "kv audit: checks %s of each request and step, in %d layers; holds %.1f MiB beside the cache on rank %d%s",
        every, sum(len(each.names) for each in pages), auditor.nbytes / 2**20, rank, more,
    )  # fmt: skip
    return auditor


def _why_not(config: Any) -> str:
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism, whose ranks learn steps later what was rejected,"
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        return "context parallelism, which spreads a request's rows over ranks,"
    if config.model_config.runner_type == "pooling":
        return "a pooling model, which samples nothing,"
    return ""


def self_check(auditor: Auditor, index: int, sampled_dtype: torch.dtype) -> None:
    """Mark rows of random bytes in these pages, plant a fault of each kind, and look whether just those are found.

    On a GPU this compiles both kernels, too. The pages are as before, the auditor is to be reset.

    Raises:
        RuntimeError: a fault was not found, or one that was not planted.
    """
    marks, pages, device = auditor.marks[index], auditor.marks[index].pages, auditor.device
    fed, last = 6, len(pages.names) - 1
    begin = pages.table_block_size  # block 0 is nobody's
    slots = torch.arange(begin, begin + fed, device=device)
    if pages.num_slots < begin + fed:
        raise RuntimeError(f"kv audit: a cache of {pages.num_slots} slots is too small to audit")
    places = pages.offsets[:, None, None] + pages.addresses(slots)
    before = pages.units[places]
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randint(-128, 128, places.shape, generator=generator, device=device)

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows, tokens = ints(0, dtype=torch.int64), ints(*range(3, 3 + fed))
    table = ints(*range(1, 2 + fed // begin + 1))[None]
    auditor.begin_request(0, "self-check", tokens[: fed - 1].tolist())
    outcome = Outcome(ints(1), ints(1), ints(9, dtype=sampled_dtype)[None])
    sample = Sample(ints(0, dtype=torch.int64), 0, fed - 1, 1)

    def look() -> list[tuple[str, int, str]]:
        batch = Batch(rows, ints(0, 1), ints(fed), tokens, num_requests=1, num_tokens=1)
        auditor.forms[index].check(batch, table, sample)
        found = auditor.look().found
        return sorted((finding.kind, finding.position, finding.layer) for finding in found)

    try:
        pages.units[places] = noise.to(pages.units.dtype)
        batch = Batch(rows, ints(0, fed), ints(fed), tokens, num_requests=1, num_tokens=fed)
        auditor.forms[index].mark(batch, slots, outcome)
        if (found := look()) or auditor.reporter.counts["checked"] != fed - 1:
            raise RuntimeError(f"kv audit: the self-check found {found} where nothing was wrong; unset {AUDIT}")
        pages.units[places[last, 0, -1]] ^= 1
        marks.identity[slots[1]] = marks.identity[slots[2]]
        marks.state[slots[2]] = REJECTED
        marks.state[slots[3]] = 0
        every = [(kind, at, pages.names[last] if not at else "all layers") for at, kind in enumerate(KINDS)]
        with auditor.reporter.quiet():
            found = look()
        if found != sorted(every):
            raise RuntimeError(f"kv audit: the self-check planted {every} and found {found}; unset {AUDIT}")
    finally:
        pages.units[places] = before
    auditor.reset()


def forget(runner: Any) -> None:
    """The runner's cache is gone."""
    if (auditor := auditor_of(runner)) is not None:
        auditor.forget_all()
