"""The cost of a sample of 8 GPUs, compared with the raw pynvml calls that it needs.

`python -m benchmarks.nvml_sample`; BENCHMARK_SECONDS is the time to watch the reader (20).

Both run alternately in one process on the stand-in. The raw calls use the same functions and handles and
ignore the results. Calls of the stand-in are nearly free, so the ratio is the worst case; with `cost_ns`,
each call takes as long as a fast call of a real driver.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.testbed.nvml.standin import NvmlStandin

GPUS = 8
ROUNDS = 600
RATIO_LIMIT = 1.3
CORE_PCT_LIMIT = 1.0
RSS_LIMIT_MIB = 25
WATCHED_S = float(os.environ.get("BENCHMARK_SECONDS", "20"))


def main() -> None:
    """Print each figure with its limit. The exit status is 0 if all are within their limits."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [f"gpus {GPUS}", *(f"process {gpu} compute {os.getpid()} 1000" for gpu in range(GPUS))]
        nvml = NvmlStandin(Path(folder), *lines)
        failed = [_compare(nvml, "free calls, a process on each GPU")]
        nvml.write(f"gpus {GPUS}")
        failed.append(_compare(nvml, "free calls, idle GPUs"))
        nvml.write(*lines, "cost_ns 5000")
        failed.append(_compare(nvml, "calls of 5 us, a process on each GPU"))
        nvml.write(*lines)
        failed.append(_watch(nvml))
    sys.exit(any(failed))


def _compare(nvml: NvmlStandin, name: str) -> bool:
    command = [sys.executable, "-m", "benchmarks.nvml_sample", "--inside"]
    measured = json.loads(subprocess.check_output(command, env=nvml.environment))
    raw, sample, whole = measured["raw_us"], measured["sample_us"], measured["answer_us"]
    print(f"{name}:")
    print(f"  raw pynvml {raw:7.1f} us   sample {sample:7.1f} us   with JSON {whole:7.1f} us")
    print(
        f"  ratio      {sample / raw:7.2f}      with JSON {whole / raw:.2f}      limit {RATIO_LIMIT} (sample)"
    )
    return bool(sample / raw > RATIO_LIMIT)


def _inside() -> None:
    """Runs in a process that has loaded the stand-in's library."""
    from mooring.agent.nvml.session import Nvml  # noqa: PLC0415 - needs the library

    session = Nvml()
    raw = _raw_calls([gpu.handle for gpu in session._gpus])
    session.sample()
    measured = _by_turns(raw, session.sample, lambda: json.dumps(session.sample()).encode())
    print(json.dumps(dict(zip(("raw_us", "sample_us", "answer_us"), measured, strict=True))))


def _raw_calls(handles: list[Any]) -> Callable[[], None]:
    import pynvml as nvml  # type: ignore[import-untyped]  # noqa: PLC0415

    def raw() -> None:
        for handle in handles:
            nvml.nvmlDeviceGetUtilizationRates(handle)
            nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
            nvml.nvmlDeviceGetPowerUsage(handle)
            nvml.nvmlDeviceGetEnforcedPowerLimit(handle)
            nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)
            nvml.nvmlDeviceGetFanSpeed(handle)
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
            nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
            nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)

    return raw


def _by_turns(*functions: Callable[[], object]) -> list[float]:
    """The median time of each, in microseconds."""
    spent_us: list[list[float]] = [[] for _ in functions]
    for _ in range(ROUNDS):
        for function, spent in zip(functions, spent_us, strict=True):
            began = time.perf_counter()
            function()
            spent.append((time.perf_counter() - began) * 1e6)
    return [statistics.median(spent) for spent in spent_us]


def _watch(nvml: NvmlStandin) -> bool:
    """The reader at its normal pace: one sample per second, the facts every 15 s."""
    command = [sys.executable, "-m", "benchmarks.nvml_sample", "--reader"]
    measured = json.loads(subprocess.check_output(command, env=nvml.environment))
    print(f"the reader at one sample a second, {WATCHED_S:g} s:")
    print(f"  child      {measured['child_pct']:7.2f} % of a core      limit {CORE_PCT_LIMIT}")
    print(f"  parent     {measured['parent_pct']:7.2f} % of a core")
    print(f"  child RSS  {measured['rss_mib']:7.1f} MiB            limit {RSS_LIMIT_MIB}")
    return bool(
        measured["child_pct"] + measured["parent_pct"] > CORE_PCT_LIMIT or measured["rss_mib"] > RSS_LIMIT_MIB
    )


def _reader() -> None:
    import psutil  # noqa: PLC0415

    from mooring.agent.gpus.reader import NvmlGpuReader  # noqa: PLC0415

    reader = NvmlGpuReader()
    assert reader.wait_first(10)
    child, parent = psutil.Process(reader.child_pid), psutil.Process()
    before = [sum(process.cpu_times()[:2]) for process in (child, parent)]
    time.sleep(WATCHED_S)
    after = [sum(process.cpu_times()[:2]) for process in (child, parent)]
    child_pct, parent_pct = ((b - a) / WATCHED_S * 100 for a, b in zip(before, after, strict=True))
    rss_mib = child.memory_info().rss / 2**20
    print(json.dumps({"child_pct": child_pct, "parent_pct": parent_pct, "rss_mib": rss_mib}))
    reader.close()


if __name__ == "__main__":
    {"--inside": _inside, "--reader": _reader}.get("".join(sys.argv[1:]), main)()
