# SPDX-License-Identifier: Apache-2.0
"""`nwor audit`: run engines of several modes under the audit and say whether each left the cache clean."""

from nwor_lab.audit.auditor import AuditReport
from nwor_lab.experiments import bench


def main(argv: list[str] | None = None) -> int:
    """`nwor audit --mode ...`: run engines under the audit; 0 when every mode but vanilla is clean.

    Takes the arguments of `nwor bench`, and measures no time.
    """
    arguments = bench.suit(bench.parser("audit").parse_args(argv))
    spec, plan, prompts = bench.read(arguments, repeats=0, audit=True)
    _, report = bench.run(spec, plan, prompts)
    bad = 0
    for mode, ranks in report["ranks"].items():
        for rank in ranks:
            found = AuditReport(**rank["audit"])
            print(f"{mode:6} rank {rank['rank']}: {'clean' if found.clean else 'DIRTY'}  {found}")
            print("".join(f"       {example}\n" for example in rank["dirty_examples"]), end="")
            bad += mode != "off" and not found.clean
    return int(bad > 0)
