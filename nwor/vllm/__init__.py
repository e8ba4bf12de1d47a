# SPDX-License-Identifier: Apache-2.0
"""NWOR inside vLLM 0.32 and 0.33: one file a patch, applied by the plugin in each process that needs it.

Where the patches go: `stats` into the front end and the engine core, and `batch` into the latter, to count and look;
`worker` into every worker, where it applies `runner_v1` or `runner_v2`, and `attention_cpu`, at device initialisation.
`attention_gpu` goes into the attention backends in use, once the caches are there and a mode can serve.
With ``VLLM_NWOR_MODE=off`` and nothing else asked for, nothing of vLLM's engine is patched; its list of variables gets
ours, and its loader of plugins asks `register` for each engine.
"""

from nwor.settings import ATTENDING, Settings

_settings = Settings()  # of this process's hooks, where it has any


def register() -> None:
    """Apply what this process needs for the mode in the environment; called again for the same, it does nothing.

    Raises:
        ValueError: a ``VLLM_NWOR_*`` variable is misspelt or has an impossible value.
        RuntimeError: a worker of this process has other settings.
        IncompatibleVLLM: this vLLM is none of the releases the hooks were written for.
        ImportError: the compiled operators are missing, do not load, or are of other sources.
    """
    global _settings
    from nwor.vllm import patch

    _be_asked_for_each_engine()  # after an error too, which vLLM lets through once
    _declare_variables()
    settings = Settings.from_env()
    if patch.wrapped():
        if settings == _settings:
            return
        _take_off(settings)
    if settings.mode != "off" or settings.eagle_bias or settings.fix_cpu_sampling:
        _put_on(settings)
        _settings = settings


def _put_on(settings: Settings) -> None:
    """Wrap what this process needs, all of it or nothing."""
    from nwor import ops
    from nwor.vllm import batch, patch, stats, worker

    patch.check_version()
    if settings.mode != "off":
        ops.load()
    try:
        worker.install(settings)
        if settings.mode != "off":
            stats.install(settings)
            if settings.mode in ATTENDING:
                batch.install()
    except BaseException:
        patch.undo_all()
        raise


def _take_off(settings: Settings) -> None:
    """Take this process's hooks off, for an engine of other settings; not where a worker runs with them."""
    from nwor.vllm import batch, patch, stats, worker

    if patch.modules() - {module.__name__ for module in (batch, stats, worker)}:
        raise RuntimeError(
            f"an engine with {_settings} was made in this process: make one with {settings} in another "
            "(in a notebook, restart the kernel)"
        )
    patch.undo_all()


def _be_asked_for_each_engine() -> None:
    """Let vLLM, which calls a plugin once a process, call `register` for each engine that it makes there.

    A mode that is asked for after an engine without one would not be active otherwise, and nothing would say so.
    """
    from vllm import plugins

    original = around = plugins.load_general_plugins
    while around is not None:  # another plugin's may be around ours
        if around.__module__ == __name__:
            return
        around = getattr(around, "__wrapped__", None)

    def load_general_plugins() -> None:
        original()
        register()

    load_general_plugins.__wrapped__ = original  # type: ignore[attr-defined]
    plugins.load_general_plugins = load_general_plugins


def _declare_variables() -> None:
    """Let vLLM list the variables: it warns of others.

    What is listed goes into the key under which vLLM keeps compiled graphs. No mode changes these, so an engine takes
    what another mode's has compiled before; an EAGLE head's biases do change them.
    """
    from vllm import envs

    for name, field in Settings.variables().items():
        of_graphs = (lambda: Settings.from_env().eagle_bias) if field == "eagle_bias" else (lambda: None)
        envs.environment_variables.setdefault(name, of_graphs)
