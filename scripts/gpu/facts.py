"""Prints what figures of this machine depend on, as one line of JSON.

usage: facts.py FOLDER-OF-CUBLAS ARCHS

Either may be empty. The status is 1 where there is no GPU, which TANDEM_CUDA_LIB with an emulator
excuses, or ARCHS, the code that the kernels' library has, is not for this one.
"""

import ctypes
import glob
import json
import os
import platform
import re
import subprocess
import sys

# Numbers of CUdevice_attribute in cuda.h.
ATTRIBUTES = {
    "compute_capability_major": 75,
    "compute_capability_minor": 76,
    "multiprocessor_count": 16,
    "l2_cache_bytes": 38,
    "shared_memory_per_block_optin": 97,
    "async_engine_count": 40,
    "kernel_exec_timeout": 17,
    "stream_priorities_supported": 78,
    "compute_preemption_supported": 90,
    "host_register_supported": 99,
    "read_only_host_register_supported": 113,
    "can_use_host_pointer_for_registered_mem": 91,
    "pageable_memory_access": 88,
    "pageable_memory_access_uses_host_page_tables": 100,
    "can_use_64_bit_stream_mem_ops": 122,
    "can_use_stream_wait_value_nor": 123,
    "handle_type_posix_file_descriptor_supported": 103,
}
QUERIES = [
    "name", "driver_version", "memory.total", "pci.bus_id", "pcie.link.gen.max", "pcie.link.gen.current",
    "pcie.link.width.max", "pcie.link.width.current", "clocks.max.sm", "clocks.max.memory", "power.limit",
]  # fmt: skip
MEMINFO = "MemTotal MemAvailable HugePages_Total HugePages_Free Hugepagesize ShmemHugePages AnonHugePages".split()


def read(path):
    try:
        with open(path, errors="replace") as f:
            return f.read().strip()
    except OSError:
        return None


def nvidia_smi():
    query = ["nvidia-smi", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stdout + done.stderr).strip()
    return [dict(zip(QUERIES, line.split(", "), strict=False)) for line in done.stdout.splitlines()]


def driver():
    """What the driver itself says of the first GPU; a sentence where it does not."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    device, value = ctypes.c_int(), ctypes.c_int()
    for call in [lambda: cuda.cuInit(0), lambda: cuda.cuDeviceGet(ctypes.byref(device), 0)]:
        status = call()
        if status:
            return f"the driver's status is {status}"
    facts = {}
    cuda.cuDriverGetVersion(ctypes.byref(value))
    facts["cuda_version"] = value.value
    for name, number in ATTRIBUTES.items():
        known = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0
        facts[name] = value.value if known else None
    return facts


def cpu():
    text = read("/proc/cpuinfo") or ""
    names = re.findall(r"^model name\s*: (.*)$", text, re.M)
    flags = set((re.findall(r"^flags\s*: (.*)$", text, re.M) or [""])[0].split())
    return {
        "model": names[0] if names else None,
        "n_cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)),
        "flags": sorted(f for f in flags if f.startswith(("avx", "amx"))),
    }


def memory():
    pairs = dict(line.split(":", 1) for line in (read("/proc/meminfo") or "").splitlines())
    return {name: pairs[name].strip() for name in MEMINFO if name in pairs}


def numa():
    nodes = {}
    for path in sorted(glob.glob("/sys/devices/system/node/node[0-9]*")):
        nodes[os.path.basename(path)] = read(f"{path}/cpulist")
    gpus = {}
    for path in glob.glob("/sys/bus/pci/devices/*"):
        if read(f"{path}/vendor") == "0x10de" and (read(f"{path}/class") or "").startswith("0x03"):
            gpus[os.path.basename(path)] = read(f"{path}/numa_node")
    return {"nodes": nodes, "node_of_gpu": gpus}


def fault_of(driver, archs):
    """Why figures would not be this GPU's; None where they are."""
    if not isinstance(driver, dict):
        return f"no GPU can be used here: {driver}"
    arch = f"{driver['compute_capability_major']}{driver['compute_capability_minor']}"
    wanted = "90a" if arch == "90" else arch
    if archs and wanted not in archs.split(";"):
        return f"the bundle has code for {archs}, and this GPU is sm_{arch}: scripts/gpu/pack.sh {wanted}"
    return None


def main():
    blas, archs = sys.argv[1:]
    library = os.environ.get("TANDEM_CUDA_LIB", "")
    pages = "/sys/kernel/mm/transparent_hugepage"
    facts = {
        "gpu": nvidia_smi(),
        "driver": driver(),
        "cublas": blas or "NOT FOUND",
        "cpu": cpu(),
        "memory": memory(),
        "numa": numa(),
        "huge_pages": {name: read(f"{pages}/{name}") for name in ("enabled", "shmem_enabled", "defrag")},
        "cgroup_memory_max": read("/sys/fs/cgroup/memory.max"),
        "memlock": read("/proc/self/limits") and re.findall(r"Max locked memory\s+(\S+)", read("/proc/self/limits")),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "library": os.path.basename(library),
        "archs": archs,
    }
    print(json.dumps(facts))
    fault = None if "_emu" in library else fault_of(facts["driver"], archs)
    if fault:
        print(f"facts: {fault}", file=sys.stderr)
    return 1 if fault else 0


if __name__ == "__main__":
    sys.exit(main())
