# SPDX-License-Identifier: Apache-2.0
"""What the user asked for with ``VLLM_NWOR_*``, read for each engine.

The names start with ``VLLM_`` because vLLM, and Ray for vLLM, carry that prefix to every worker.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from nwor.ways import POLICIES

MODES = ("off", *POLICIES)
ATTENDING = tuple(mode for mode, policy in POLICIES.items() if policy.attends)
"""Modes with an attention of their own."""
CLEAN = tuple(mode for mode, policy in POLICIES.items() if policy.is_clean)
"""Modes that leave nothing of a rejected draft in the pages behind a step."""
PREFIX = "VLLM_NWOR_"
WORDS = ("mode", "tuning")  # the others are 0 or 1


@dataclass(frozen=True)
class Settings:
    """One process's settings; a value that is not one of those listed is an error, never a default.

    mode: ``off`` leaves vLLM untouched; ``cow`` logs the draft slots before the forward and restores the rejected
        ones; ``stage`` keeps drafts out of the pages until they are accepted, with an attention that finds them where
        they wait, and in a step that this attention does not serve, as one with prefill, does as ``cow``; ``direct``,
        the control, has that attention and writes every row to its page at once, as vLLM does.
    emit_metrics: where vLLM keeps statistics, export the ``vllm:nwor_*`` counters, and check the worker's committed
        counts against the scheduler's.
    debug_sync: check them in any case, and stop at a difference.
    audit: for the lab's plugin, which compares the whole cache before and after every step, in every mode, ``off`` too.
    eagle_bias: apply an EAGLE head's biases, which vLLM drops; in no mode unless asked for, so that all modes run the
        same drafter.
    fix_cpu_sampling: repair vLLM's sampling at temperatures above 0 with speculation on a CPU.
    tuning: a folder whose tables of configurations are used instead of those shipped (`nwor.attention.configs`).
    """

    mode: str = "off"
    emit_metrics: bool = True
    debug_sync: bool = False
    audit: bool = False
    eagle_bias: bool = False
    fix_cpu_sampling: bool = False
    tuning: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"{PREFIX}MODE={self.mode!r} is not a mode; choose one of {', '.join(MODES)}")
        if self.tuning and not os.path.isdir(self.tuning):
            raise ValueError(f"{PREFIX}TUNING={self.tuning!r} is not a folder")

    @classmethod
    def variables(cls) -> dict[str, str]:
        """The field of each environment variable."""
        return {PREFIX + field.name.upper(): field.name for field in fields(cls)}

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        known = cls.variables()
        given = {name: value for name, value in environ.items() if name.startswith(PREFIX)}
        if unknown := sorted(given.keys() - known.keys()):
            raise ValueError(f"unknown setting {', '.join(unknown)}; the settings are {', '.join(known)}")
        words = {known[name]: value for name, value in given.items() if known[name] in WORDS}
        flags = {known[name]: _flag(name, value) for name, value in given.items() if known[name] not in WORDS}
        return cls(**words, **flags)  # type: ignore[arg-type]

    def environ(self) -> dict[str, str]:
        """The same settings as environment variables, for a child process; no `tuning` leaves it its parent's."""
        found = {name: getattr(self, field) for name, field in self.variables().items()}
        words = {name: str(int(value)) if isinstance(value, bool) else value for name, value in found.items()}
        return {name: word for name, word in words.items() if word}


def _flag(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} must be 0 or 1")
    return value == "1"
