# SPDX-License-Identifier: Apache-2.0
"""`nwor <command>`: each command lives in a module of its own and is imported only when it is called."""

import importlib
import multiprocessing
import os
import signal
import sys

COMMANDS = {
    "doctor": (
        "nwor_lab.run.doctor",
        "say what is installed, which modes can run here and what this machine cannot do",
    ),
    "reproduce": (
        "nwor_lab.run.reproduce",
        "run the notebooks, once or over a grid of parameters, and report their claims",
    ),
    "bench": ("nwor_lab.bench.bench", "compare modes side by side: tokens, cache and the time of a step"),
    "serving": ("nwor_lab.serving.command", "load servers of several modes by vLLM's own client, requests arriving"),
    "audit": ("nwor_lab.bench.audit", "prove that no uncommitted byte is left in the cache"),
    "soak": ("nwor_lab.soak.command", "serve random traffic, every step audited and every text beside vanilla's"),
    "acceptance": ("nwor_lab.bench.acceptance", "count accepted drafts at many draft lengths"),
    "tune": ("nwor_lab.gpu.tune", "find the fastest configurations of stage's attention on this GPU"),
    "figures": ("nwor_lab.figures.command", "draw the paper's figures from the tables of a folder"),
    "measure": ("nwor_lab.run.measure", "measure what data/recorded holds, and record it there"),
}


def _terminate(*_: object) -> None:
    """End this command as Ctrl-C does, which reaches its engines too."""
    for engine in multiprocessing.active_children():
        engine.terminate()
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status: 130 where Ctrl-C or SIGTERM ended it, 141 where nobody reads it."""
    if argv is None:
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # nohup has it ignored
            signal.signal(signal.SIGHUP, _terminate)
    try:
        status = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nnwor: interrupted", file=sys.stderr)
        return 130
    except OSError as error:  # what it had to say was not taken
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what Python still flushes
        if isinstance(error, BrokenPipeError):
            return 141
        print(f"nwor: {error}", file=sys.stderr)
        return 1


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if command in ("-h", "--help"):
        print("usage: nwor <command> [options]\n\nNo-Write-On-Reject for vLLM's speculative decoding.\n")
        print(*(f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()), sep="\n")
        print("\n`nwor <command> --help` says what each takes.")
        return 0
    if command not in COMMANDS:
        print(f"nwor: {command or 'which command'}? One of {', '.join(COMMANDS)} (nwor --help)", file=sys.stderr)
        return 2
    try:
        from nwor_lab import progress

        with progress.moving():
            progress.say(f"{command}: starting", plain=False)
            module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as missing:
        if (missing.name or "nwor").startswith("nwor"):
            raise
        print(f"nwor {command}: no {missing.name} here: pip install 'nwor[lab]'", file=sys.stderr)
        return 2
    return module.main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
