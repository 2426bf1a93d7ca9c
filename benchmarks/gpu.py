"""All tests and benchmarks that need CUDA, reported in one JSON file in less than ten minutes.

    python benchmarks/gpu.py [--output FILE.json]

runs the tests marked ``gpu`` and the decoding, extraction and training benchmarks, each in a separate
process with a time budget: if a stage fails or times out, its first results and the other stages are kept.
Needs neither data nor a network. Without a GPU it prints an error and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = {"tests": 260, "decoding": 100, "extraction": 80, "training": 80}  # seconds
GRACE = 10  # seconds for a stage to write its results after the interrupt
CLIPS, BATCH = 64, 64
Result = tuple[str, Any]  # name and figures; each result is written as soon as it is available


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the machine and the libraries."""
    import capvid

    facts: dict[str, Any] = {
        "capvid": capvid.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            driver = None
        facts |= {
            "gpu": properties.name,
            "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": driver,
        }
    return facts


def decoding(device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Yield captions per second of every captioner, greedy and with five beams."""
    import decoding as benchmark
    from made import SEGMENTS, make

    from capvid.captioners.base import CAPTIONERS
    from capvid.training.recipe import load_recipe

    benchmark.VIDEOS = 4 if quick else benchmark.VIDEOS
    for name in list(CAPTIONERS)[: 1 if quick else None]:
        torch.manual_seed(1)
        captioner = make(load_recipe(f"{name}-small")).to(device).eval()
        runs = {beams: benchmark.decoding(captioner, device, int(beams)) for beams in ("1", "5")}
        seconds = benchmark.medians(runs, device, 1 if quick else 5)
        captions = benchmark.VIDEOS * (SEGMENTS if captioner.paragraphs else 1)
        yield (
            name,
            {
                "greedy_captions_per_second": captions / seconds["1"],
                "beam_5_captions_per_second": captions / seconds["5"],
                "beam_5_to_greedy_time": seconds["5"] / seconds["1"],
            },
        )


def extraction(device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Yield frames per second of decoding, of the bundled backbone, and of both in the pipeline."""
    from extraction import Runs, timed

    from capvid.backbones.backbone import load_backbone
    from capvid.video.worker_pool import WorkerPool

    with tempfile.TemporaryDirectory() as folder:
        clips = [Path(folder) / f"{number}.mp4" for number in range(4 if quick else CLIPS)]
        for clip in clips:
            clip.symlink_to(ROOT / "examples" / "car.mp4")
        for precision in ("fp32",) if quick else ("fp32", "fp16", "bf16"):
            backbone = load_backbone("capvid-small", device=device, precision=precision)
            runs = Runs(clips, backbone, backbone, BATCH)
            with WorkerPool(max(1, (os.cpu_count() or 2) - 1)) as pool:
                stages: dict[str, Callable[[], int]] = {
                    "decoding": lambda runs=runs, pool=pool: runs.decoding(pool),  # type: ignore[misc]
                    "model": runs.model,
                    "pipeline": lambda runs=runs, pool=pool: runs.pipeline(pool),  # type: ignore[misc]
                }
                for name, run in stages.items():
                    measured = [timed(run) for _ in range(4)][1:]  # the first run warms up
                    speeds = [frames / seconds for seconds, frames in measured]
                    yield f"{precision} {name}", {"frames_per_second": statistics.median(speeds)}


def training(device: torch.device, *, quick: bool) -> Iterator[Result]:
    """Yield samples per second of every captioner, in float32 and under bfloat16 autocast."""
    from training import samples_per_second

    from capvid.captioners.base import CAPTIONERS

    for name in list(CAPTIONERS)[: 1 if quick else None]:
        for precision in ("fp32",) if quick else ("fp32", "bf16"):
            steps = 1 if quick else 10
            speed, parameters = samples_per_second(name, device, bf16=precision == "bf16", steps=steps)
            yield f"{name} {precision}", {"samples_per_second": speed, "parameters": parameters}


def run_tests(device: torch.device, output: Path, *, quick: bool) -> list[str]:
    """Return the command that runs the tests and writes their results as JUnit XML."""
    workers = str(min(4, os.cpu_count() or 1))
    chosen = ["-k", "compute_concurrently or (learns_the_same and m3)"] if quick else []
    return [
        *(sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-n", workers),
        *(*chosen, f"--junitxml={output}", "tests/gpu"),
    ]


def junit_results(path: Path) -> dict[str, Any]:
    """Summarise JUnit XML: counts, and the messages of the tests that failed or were skipped."""
    cases = ElementTree.parse(path).getroot().findall(".//testcase")
    results: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": {}}
    for case in cases:
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if problem is None:
            results["passed"] += 1
        else:
            group = "skipped" if problem.tag == "skipped" else "failed"
            results[group][case.get("name")] = problem.get("message", "")[:2000]
    return results


def run_stage(name: str, device: torch.device, folder: Path, *, quick: bool) -> dict[str, Any]:
    """Run one stage in a separate process within its budget; return its results and exit status."""
    output = folder / name
    if name == "tests":
        command = run_tests(device, output, quick=quick)
    else:
        command = [
            sys.executable,
            __file__,
            "--stage",
            name,
            "--device",
            str(device),
            "--output",
            str(output),
        ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "CAPVID_TEST_DEVICE": str(device)}
    start = time.monotonic()
    log = folder / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=variables, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = f"exit status {process.wait(BUDGETS[name])}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {BUDGETS[name]} s"
            process.send_signal(signal.SIGINT)  # pytest still writes the results so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends the stage's children
            process.wait()
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1), "results": {}}
    try:
        if name == "tests":
            result["results"] = junit_results(output)
        else:
            result["results"] = dict(json.loads(line) for line in output.read_text().splitlines())
    except (OSError, ElementTree.ParseError, ValueError) as error:
        result["status"] += f", incomplete results ({error})"
    if status != "exit status 0":
        result["log"] = log.read_text(errors="replace")[-4000:]
    return result


def main() -> int:
    """Run every stage and write the JSON file, or run one stage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu.json"), help="default: gpu.json")
    parser.add_argument(
        "--device", default="cuda", help=argparse.SUPPRESS
    )  # cpu: a quick check of this script
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    quick = device.type == "cpu"
    if not quick and not torch.cuda.is_available():
        print("error: torch finds no CUDA device on this machine; nothing was run", file=sys.stderr)
        return 1
    if options.stage:
        with options.output.open("w") as stream:
            for result in STAGES[options.stage](device, quick=quick):
                print(json.dumps(result), file=stream, flush=True)
        return 0
    report: dict[str, Any] = {"environment": environment(device)}
    with tempfile.TemporaryDirectory() as folder:
        for name in BUDGETS:
            report[name] = run_stage(name, device, Path(folder), quick=quick)
            print(f"{name}: {report[name]['status']}, {report[name]['seconds']} s", flush=True)
            options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(f"all figures are in {options.output}")
    return int(any(report[name]["status"] != "exit status 0" for name in BUDGETS))


STAGES: dict[str, Callable[..., Iterator[Result]]] = {
    "decoding": decoding,
    "extraction": extraction,
    "training": training,
}

if __name__ == "__main__":
    sys.exit(main())
