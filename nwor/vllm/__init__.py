# SPDX-License-Identifier: Apache-2.0
"""NWOR inside vLLM 0.32 and 0.33: one file a patch, applied by the plugin in each process that needs it.

Where the patches go: `scheduler` and `metrics` into the front end and the engine core, where they only count and check;
`worker` into every worker, where it applies `runner_v1` or `runner_v2`, and `attention_cpu`, at device initialisation.
`attention_gpu` goes into the attention backends in use, once the caches are there and a mode can serve.
With ``VLLM_NWOR_MODE=off`` and nothing else asked for, nothing is patched; vLLM's list of variables gets ours.
"""

from nwor.settings import Settings


def register() -> None:
    """Apply what this process needs for the mode in the environment; called again, it does nothing.

    Raises:
        ValueError: a ``VLLM_NWOR_*`` variable is misspelt or has an impossible value.
        IncompatibleVLLM: this vLLM is none of the releases the hooks were written for.
        ImportError: the compiled operators are missing, do not load, or are of other sources.
    """
    settings = Settings.from_env()
    _declare_variables()
    if settings.mode == "off" and not settings.eagle_bias and not settings.fix_cpu_sampling:
        return

    from nwor import ops
    from nwor.vllm import metrics, patch, scheduler, worker

    patch.check_version()
    if settings.mode != "off":
        ops.load()
    worker.install(settings)
    scheduler.install(settings)
    if settings.emit_metrics and settings.mode != "off":
        metrics.install()


def _declare_variables() -> None:
    """Let vLLM list the variables: it warns of others.

    What is listed goes into the key under which vLLM keeps compiled graphs. No mode changes these, so an engine takes
    what another mode's has compiled before; an EAGLE head's biases do change them.
    """
    from vllm import envs

    for name, field in Settings.variables().items():
        of_graphs = (lambda: Settings.from_env().eagle_bias) if field == "eagle_bias" else (lambda: None)
        envs.environment_variables.setdefault(name, of_graphs)
