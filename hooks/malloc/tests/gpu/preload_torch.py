#!/usr/bin/env python3
"""The hook under an unmodified PyTorch, on a machine with a GPU.

    python preload_torch.py --hook target/release/libssdtrain_malloc_hook.so
    python preload_torch.py --hook target/release/libssdtrain_malloc_hook.so --expandable

Starts itself again with the library preloaded. Allocates and frees tensors at random, a thousand times, and compares what the
hook has counted with the segments of PyTorch's allocator, each time after the hook's thread has registered what is live; then frees
everything and looks for what is left; then measures what cudaMalloc and cudaFree cost with the hook off and on. Prints a line for each
check, and ends with 0 if all of them passed.

With --cost-only nothing but the cost is measured, and PyTorch is not needed.
"""

import argparse
import ctypes
import os
import random
import statistics
import sys
import time

FIELDS = (
    "allocations", "frees", "unknown_frees", "registrations", "deregistrations", "refusals", "live_segments",
    "live_bytes", "registered_segments", "registered_bytes", "last_error",
)
MIB = 1 << 20


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in FIELDS]

    def __str__(self):
        return ", ".join(f"{name} {getattr(self, name)}" for name in FIELDS)


class Hook:
    """The functions of the preloaded library."""

    def __init__(self):
        here = ctypes.CDLL(None)
        self.enable = here.ssdtrain_malloc_hook_enable
        self.wait = here.ssdtrain_malloc_hook_wait
        self._stats = here.ssdtrain_malloc_hook_stats
        self._stats.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._stats.restype = None

    def stats(self):
        """The counters, once nothing waits for its registration any more."""
        self.wait()
        stats = Stats()
        self._stats(ctypes.byref(stats), ctypes.sizeof(stats))
        return stats


class Checks:
    """Says what passed and what did not."""

    def __init__(self):
        self.failed = 0

    def check(self, passed, what, detail=""):
        self.failed += not passed
        print(f"{'PASS' if passed else 'FAIL'} {what}{': ' + detail if detail else ''}", flush=True)


def segments(torch):
    """How many segments PyTorch has, and their bytes."""
    snapshot = torch.cuda.memory_snapshot()
    return len(snapshot), sum(segment["total_size"] for segment in snapshot)


def random_work(checks, hook, arguments):
    import torch

    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    torch.cuda.init()
    torch.cuda.synchronize()
    # What others than PyTorch's allocator have on the device.
    before = hook.stats()
    count_before, bytes_before = segments(torch)
    others = (before.live_segments - count_before, before.live_bytes - bytes_before)

    def compare(when):
        stats, (count, total) = hook.stats(), segments(torch)
        if not arguments.expandable:  # an expandable segment is one to PyTorch, and has many mappings
            checks.check(
                stats.live_segments - others[0] == count, f"segments {when}",
                f"hook {stats.live_segments - others[0]}, PyTorch {count}",
            )
        checks.check(
            stats.live_bytes - others[1] == total, f"bytes {when}",
            f"hook {stats.live_bytes - others[1]}, PyTorch {total}",
        )
        if stats.refusals == 0:
            checks.check(
                stats.registered_segments == stats.live_segments, f"all are registered {when}",
                f"{stats.registered_segments} of {stats.live_segments}",
            )
        return stats

    draw = random.Random(arguments.seed)
    limit = arguments.gib << 30
    kept, held = [], 0
    for number in range(arguments.operations):
        if kept and (held > limit or draw.random() < 0.5):
            tensor, value = kept.pop(draw.randrange(len(kept)))
            held -= tensor.numel()
            if tensor[-1].item() != value:
                checks.check(False, "bytes of a tensor are what was written", f"after {number} operations")
            del tensor
        else:
            size = int(2 ** draw.uniform(10, 28))
            value = number % 251
            kept.append((torch.full((size,), value, dtype=torch.uint8, device="cuda"), value))
            held += size
        if number % 97 == 96:
            torch.cuda.empty_cache()
        if (number + 1) % (arguments.operations // 5) == 0:
            compare(f"after {number + 1} operations")

    stats = compare("with tensors live")
    checks.check(  # what was freed before its turn was not tried
        stats.live_segments <= stats.registrations + stats.refusals <= stats.allocations, "segments are tried once",
        f"{stats.registrations} accepted, {stats.refusals} refused, {stats.allocations} seen, {stats.live_segments} live",
    )
    if stats.refusals:
        print(f"NOTE cuFile refused {stats.refusals} of {stats.allocations}; its last error was {stats.last_error}")
    checks.check(stats.allocations > 0, "allocations are seen", str(stats.allocations))
    if arguments.require_registered:
        checks.check(stats.refusals == 0 and stats.registrations > 0, "none was refused", str(stats))

    kept.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    stats, (count, total) = hook.stats(), segments(torch)
    checks.check((count, total) == (0, 0), "PyTorch has let go of everything", f"{count} segments, {total} bytes")
    left = (stats.live_segments - others[0], stats.live_bytes - others[1])
    checks.check(left == (0, 0), "nothing is left in the hook", f"{left[0]} segments, {left[1]} bytes")
    checks.check(
        stats.registered_segments <= others[0], "nothing is left registered", f"{stats.registered_segments} segments"
    )

    # Turned off in the middle, with memory live.
    tensor = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    hook.enable(0)
    stats = hook.stats()
    checks.check(
        stats.registered_segments == 0 and stats.registrations == stats.deregistrations,
        "turned off, nothing is registered", str(stats),
    )
    checks.check(int(tensor.to(torch.int64).sum().item()) == 7 * 64 * MIB, "memory is whole after that")
    del tensor
    torch.cuda.empty_cache()
    hook.enable(1)


def runtime_path():
    """The CUDA runtime of this process."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split()[-1]
            if os.path.basename(path).startswith("libcudart.so"):
                return path
    return "libcudart.so"


def median_of(ways, hook, size, rounds):
    """Medians of cudaMalloc and cudaFree in microseconds, for each way: (library, hook on or off), in turn."""
    times = {way: ([], []) for way in ways}
    for number in range(rounds + 5):
        order = list(ways)
        random.Random(number).shuffle(order)
        for way in order:
            library, on = ways[way]
            hook.enable(on)
            memory = ctypes.c_void_p()
            start = time.perf_counter_ns()
            status = library.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(size))
            middle = time.perf_counter_ns()
            if status:
                raise SystemExit(f"cudaMalloc of {size} bytes failed with {status}")
            freed = library.cudaFree(memory)
            end = time.perf_counter_ns()
            if freed:
                raise SystemExit(f"cudaFree failed with {freed}")
            if number >= 5:  # the first ones warm up
                times[way][0].append((middle - start) / 1e3)
                times[way][1].append((end - middle) / 1e3)
    return {way: [statistics.median(calls) for calls in both] for way, both in times.items()}


def cost(checks, hook, arguments):
    """What cudaMalloc and cudaFree cost: called past the hook, with the hook off, and with it on.

    With it on, cudaFree waits for the registration that cudaMalloc has left to the hook's thread, if that has begun, and undoes it:
    that is told, not judged.
    """
    direct = ctypes.CDLL(arguments.cudart or runtime_path())  # a handle of its own goes past the hook
    hooked = ctypes.CDLL(None)
    hook.enable(1)
    first = ctypes.c_void_p()
    if hooked.cudaMalloc(ctypes.byref(first), ctypes.c_size_t(2 * MIB)) or hook.wait() or hooked.cudaFree(first):  # opens cuFile
        raise SystemExit("cudaMalloc, the hook, or cudaFree failed")
    for size in (2 * MIB, 20 * MIB, 256 * MIB):
        # A registration leaves the caches cold for whoever is next, so it has turns of its own.
        off = median_of({"past": (direct, 0), "hook": (hooked, 0)}, hook, size, 10 * arguments.rounds)
        on = median_of({"past": (direct, 1), "hook": (hooked, 1)}, hook, size, arguments.rounds)
        for state, median, limit in (("off", off, arguments.max_off_ratio), ("on", on, arguments.max_on_ratio)):
            for at, call in enumerate(("cudaMalloc", "cudaFree")):
                past, by_hook = median["past"][at], median["hook"][at]
                line = f"{call} of {size // MIB} MiB, hook {state}: {by_hook:.1f} us, {past:.1f} past it (x{by_hook / past:.3f})"
                if limit and (state == "off" or call == "cudaMalloc"):
                    checks.check(by_hook <= limit * past, line)
                else:
                    print("COST", line)
    hook.enable(1)
    stats = hook.stats()
    print(f"NOTE {stats}")
    checks.check(stats.registered_segments == 0, "the measurement leaves nothing registered")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hook", help="libssdtrain_malloc_hook.so; needed unless it is preloaded already")
    parser.add_argument("--expandable", action="store_true", help="with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    parser.add_argument("--operations", type=int, default=1000)
    parser.add_argument("--gib", type=int, default=8, help="how much is live at most, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=51, help="of the measurement of cost")
    parser.add_argument("--require-registered", action="store_true", help="fail if cuFile refuses any")
    parser.add_argument("--max-off-ratio", type=float, help="fail if a call costs more than this while off")
    parser.add_argument("--max-on-ratio", type=float, help="the same of cudaMalloc while on")
    parser.add_argument("--cost-only", action="store_true")
    parser.add_argument("--cudart", help="the CUDA runtime, if none is loaded")
    arguments = parser.parse_args()

    if arguments.hook:
        os.environ["LD_PRELOAD"] = os.path.abspath(arguments.hook)
        os.environ["SSDTRAIN_MALLOC_HOOK"] = "1"
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{arguments.expandable}"
        again = list(sys.argv)
        for at, word in enumerate(again):
            if word == "--hook":
                del again[at : at + 2]
                break
            if word.startswith("--hook="):
                del again[at]
                break
        os.execv(sys.executable, [sys.executable, *again])

    if not hasattr(ctypes.CDLL(None), "ssdtrain_malloc_hook_enable"):
        raise SystemExit("the hook is not preloaded: name it with --hook")
    hook, checks = Hook(), Checks()
    hook.enable(1)
    if arguments.cost_only and arguments.cudart:
        ctypes.CDLL(arguments.cudart)
    if not arguments.cost_only:
        random_work(checks, hook, arguments)
    cost(checks, hook, arguments)
    print("FAIL" if checks.failed else "PASS", f"{checks.failed} checks failed" if checks.failed else "all checks")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
