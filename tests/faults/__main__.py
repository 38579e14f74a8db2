"""`python -m tests.faults [COUNT] [SEED] [FIRST]`: a campaign, and tables of what was hit and what was left."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from tests.faults.campaign import Totals, run_campaign


def table(counts: Mapping[tuple[str, str], int]) -> str:
    """Rows and columns as Markdown."""
    rows = sorted({row for row, _ in counts})
    columns = sorted({column for _, column in counts})
    lines = [["", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[row, *(str(counts.get((row, column), 0)) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(totals: Totals) -> str:
    """All that a campaign showed."""
    by_state = {
        (f"{victim}, {fault}", what): count
        for (victim, fault, what), count in totals.outcomes.items()
    }
    gone, back = sorted(totals.gone_s), sorted(totals.back_s)
    lines = [
        f"{totals.runs} runs in {totals.seconds:.0f} s ({totals.runs / totals.seconds:.1f} a second), "
        f"{totals.boots} servers; something was under way in {100 * totals.hit_share:.0f} % of the runs",
        f"\nwhat the victim was at:\n\n{table(by_state)}",
        f"\nhow much of the prompt was there afterwards:\n\n{table(totals.stored)}\n",
    ]
    for name, seconds in (("a dead client gone", gone), ("worker back at a new server", back)):
        if seconds:
            lines.append(
                f"{name}: median {seconds[len(seconds) // 2]:.3f} s, longest {seconds[-1]:.3f} s"
            )
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    logging.disable(logging.CRITICAL)
    count, seed, first = (*map(int, sys.argv[1:4]), *(200, 0, 0)[len(sys.argv) - 1 :])
    print(report(run_campaign(count, seed, first)))


if __name__ == "__main__":
    main()
