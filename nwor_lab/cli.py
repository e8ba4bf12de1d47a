# SPDX-License-Identifier: Apache-2.0
"""`nwor <command>`: each command lives in a module of its own and is imported only when it is called."""

import argparse
import importlib
import sys

COMMANDS = {
    "doctor": ("nwor_lab.doctor", "say what is installed, which modes can run here and what this machine cannot do"),
    "reproduce": (
        "nwor_lab.reproduce",
        "run the notebooks, once or over a grid of parameters, and report their claims",
    ),
    "bench": ("nwor_lab.experiments.bench", "run one engine configuration and write its results"),
    "audit": ("nwor_lab.experiments.audit", "prove that no uncommitted byte is left in the cache"),
    "soak": ("nwor_lab.soak.command", "serve random traffic, every step audited and every text beside vanilla's"),
    "acceptance": ("nwor_lab.experiments.acceptance", "count accepted drafts at many draft lengths"),
    "tune": ("nwor_lab.microbench.tune", "find the fastest configurations of stage's attention on this GPU"),
    "figures": ("nwor_lab.plots.paper", "redraw the paper figures"),
    "measure": ("nwor_lab.measure", "measure what data/recorded holds, and record it there"),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="nwor",
        description="No-Write-On-Reject for vLLM's speculative decoding.",
        epilog="\n".join(f"  {name:12}{text}" for name, (_, text) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of those below; each takes --help")
    arguments = sys.argv[1:] if argv is None else argv
    command = parser.parse_args(arguments[:1]).command
    try:
        module = importlib.import_module(COMMANDS[command][0])
    except ModuleNotFoundError as missing:
        if (missing.name or "nwor").startswith("nwor"):
            raise
        print(f"nwor {command}: no {missing.name} here: pip install 'nwor[lab]'", file=sys.stderr)
        return 2
    return module.main(arguments[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
