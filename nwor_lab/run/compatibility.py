# SPDX-License-Identifier: Apache-2.0
"""`nwor doctor --vllm [PATH]`: each function that NWOR wraps, in vLLM's sources, beside the releases that are known.

Sources are parsed and not imported: those of the installed vLLM, or an unpacked wheel's, which need neither a GPU nor
what that vLLM asks for.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from pathlib import Path

from nwor.vllm import releases
from nwor.vllm.releases import Function


def sources(path: Path | None = None) -> Path:
    """The folder that holds ``vllm/``: `path`, or that of the installed vLLM.

    Raises:
        FileNotFoundError: there is no vLLM.
    """
    spec = importlib.util.find_spec("vllm") if path is None else None
    root = Path(spec.origin).parent.parent if spec and spec.origin else path or Path()
    if not (root / "vllm" / "_version.py").is_file():
        raise FileNotFoundError(f"no vLLM in {root}: give the folder of an unpacked wheel")
    return root


def version(root: Path) -> str:
    """The version that sources say they are of."""
    [found] = re.findall(r"^__version__ = .*['\"](.+)['\"]$", (root / "vllm" / "_version.py").read_text(), re.MULTILINE)
    return found


def find(root: Path, name: str) -> Function | None:
    """A function by its full name, None where the sources have none of that name."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        file = root.joinpath(*parts[:cut]).with_suffix(".py")
        if file.is_file():
            scope: list[ast.stmt] = _parse(file).body
            for part in parts[cut:]:
                named = [node for node in scope if getattr(node, "name", None) == part]
                if not named:
                    return None
                scope = getattr(named[-1], "body", [])
            return releases.of_node(named[-1]) if isinstance(named[-1], ast.FunctionDef) else None
    return None


@functools.lru_cache(maxsize=4)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def report(root: Path) -> int:
    """Print a line a function, and return how many are as in no known release: those are refused."""
    print(f"vLLM {version(root)}, beside each known release\n")
    print("  " + "".join(f"{release:19}" for release in releases.RELEASES))
    unknown, every = 0, list[list[str]]()
    for name, known in releases.KNOWN.items():
        said = [releases.compare(find(root, name), known.get(release)) for release in releases.RELEASES]
        every.append([word.partition(" (")[0] for word in said])
        unknown += "unchanged" not in said
        details = "".join(sorted({word[word.index(" (") :] for word in said if " (" in word}))
        print("  " + "".join(f"{word:19}" for word in every[-1]) + name.removeprefix("vllm.") + details)
    print()
    for release, words in zip(releases.RELEASES, zip(*every, strict=True), strict=True):
        print(f"beside {release}: {', '.join(f'{words.count(word)} {word}' for word in sorted({*words}))}")
    print(f"{unknown} of {len(releases.KNOWN)} functions are as in no known release")
    return unknown


def record(root: Path) -> None:
    """Write these sources into `releases.FILE` as a known release, a line for every function named there."""
    parts, stored = [], json.loads(releases.FILE.read_text())
    for name, known in sorted(stored.items()):
        if (found := find(root, name)) is not None:
            known[releases.release_of(version(root))] = list(found)
        inside = ",\n".join(f"    {json.dumps(release)}: {json.dumps(known[release])}" for release in sorted(known))
        parts.append(f"  {json.dumps(name)}: {{\n{inside}\n  }}")
    releases.FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")
