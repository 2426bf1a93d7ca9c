"""Median time of ``capvid --help`` and of ``python -c "import typer, rich"``, in interleaved runs.

python benchmarks/help_time.py [RUNS]
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "capvid --help": [sys.executable, "-m", "capvid", "--help"],
    "import typer, rich": [sys.executable, "-c", "import typer, rich"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(runs + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first warms up
    for name, median in medians.items():
        print(f"{name:20} {1000 * median:6.0f} ms")
    first, second = medians.values()
    print(f"ratio {first / second:.2f}")


if __name__ == "__main__":
    main()
