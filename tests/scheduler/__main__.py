"""`python -m tests.scheduler [STEPS] [FIRST_SEED]`: a longer campaign, and a table of what became of the tokens."""

from __future__ import annotations

import sys

from tests.scheduler.campaign import Totals, run_campaign
from tests.scheduler.scenario import FAMILIES


def table(columns: dict[str, Totals]) -> str:
    """One column a family, one line an outcome."""
    names = sorted({name for totals in columns.values() for name in totals.outcomes})
    seen = sorted({name for totals in columns.values() for name in totals.seen})
    lines = [["", *columns]]
    lines.append(["scenarios", *(str(totals.scenarios) for totals in columns.values())])
    lines.append(["steps", *(str(totals.steps) for totals in columns.values())])
    lines.append(
        [
            "steps per second",
            *(f"{t.steps / max(t.seconds, 1e-9):.0f}" for t in columns.values()),
        ]
    )
    for name in names:
        lines.append([f"tokens {name}", *(str(t.outcomes[name]) for t in columns.values())])
    for name in seen:
        lines.append([f"times {name}", *(str(t.seen[name]) for t in columns.values())])
    return "\n".join(
        f"{line[0]:30}" + "".join(f"{cell:>19}" for cell in line[1:]) for line in lines
    )


def main() -> None:
    """Run and print."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    first_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    columns = {
        family.name: run_campaign(family, steps // len(FAMILIES), first_seed) for family in FAMILIES
    }
    print(table(columns))


if __name__ == "__main__":
    main()
