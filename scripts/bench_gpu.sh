#!/bin/bash
# Everything a GPU is needed for, in one run of under ten minutes: builds with CUDA, runs the tests of
# the CUDA device, the golden models and a server on the GPU, the operators' benchmarks, as JSON, whole
# models with experts on either side of the bus, and compute-sanitizer over the tests.
# usage: scripts/bench_gpu.sh [FILE.json]      default: bench/results/gpu.json
# The exit status is 0 when everything passed; what failed is told from what had not the time to. TANDEM_PYTHON
# names a python with what scripts/requirements-test.txt asks for (default: .venv/bin/python). TANDEM_BUILD names a build folder
# that has everything already, for this GPU, where what a build needs is not installed; libraries that
# are not there either are looked for in its lib/.
set -uo pipefail
cd "$(dirname "$0")/.."

out=${1:-bench/results/gpu.json}
build=${TANDEM_BUILD:-build-gpu}
case $build in /*) ;; *) build=$PWD/$build ;; esac
python=$(command -v "${TANDEM_PYTHON:-.venv/bin/python}")
failed=0
unfinished=()
started=$SECONDS
limit=590 # seconds for all of it
timed_out=124

say() { printf '\n== %s [%d s]\n' "$*" $((SECONDS - started)); }
# try MOST NAME COMMAND...: at most so many seconds, and no more than are left.
try() {
  local most=$1 name=$2 left=$((limit - SECONDS + started)) status=$timed_out
  shift 2
  say "$name"
  if [ $left -lt $most ]; then most=$left; fi
  if [ $most -gt 0 ]; then
    status=0
    timeout -k 5 $most "$@" || status=$?
  fi
  case $status in
    0) ;;
    "$timed_out" | 137)
      echo "NOT FINISHED: $name"
      unfinished+=("$name")
      ;;
    *)
      echo "FAILED: $name"
      failed=$((failed + 1))
      ;;
  esac
}

if ! command -v nvidia-smi > /dev/null || ! nvidia-smi -L | grep -q GPU; then
  echo "bench_gpu: no GPU here (nvidia-smi -L lists none)" >&2
  exit 2
fi
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -1; }
query name,compute_cap,driver_version,memory.total
arch=$(query compute_cap | tr -d .)
[ "$arch" != 90 ] || arch=90a

build_all() {
  say "build for sm_$arch"
  cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DTD_CUDA=ON -DTD_CUDA_ARCHS="$arch" \
    -DTD_WERROR=OFF > "$build.log" 2>&1 &&
    ninja -C "$build" tandem tandem_cuda bench_gpu test_cuda_device test_cuda_ops test_cuda_attn \
      test_cuda_engine >> "$build.log" 2>&1 || {
    tail -30 "$build.log"
    exit 1
  }
}
if [ -z "${TANDEM_BUILD:-}" ]; then
  build_all
elif ! grep -q "^TD_CUDA_ARCHS:[^=]*=\(.*;\)\?$arch\(;.*\)\?$" "$build/CMakeCache.txt"; then
  echo "bench_gpu: $build has no code for sm_$arch: its kernels are not the ones to measure" >&2
  exit 2
fi

if [ -d "$build/lib" ]; then export LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; fi
export TANDEM_CUDA_LIB=$build/bin/libtandem_cuda.so
for test in device ops attn engine; do
  try 60 "test_cuda_$test" "$build/bin/test_cuda_$test"
done

mkdir -p "$(dirname "$out")"
commit=$(git describe --always --dirty 2> /dev/null || echo unknown)
nvcc=$(sed -n 's/^TD_NVCC:[^=]*=//p' "$build/CMakeCache.txt" 2> /dev/null)
head=("commit=$commit" "gpu=$(query name)" "driver=$(query driver_version)"
  "clocks=$(query clocks.max.sm,clocks.max.memory,power.limit)"
  "cuda=$("${nvcc:-nvcc}" --version 2> /dev/null | sed -n 's/.*release \([^,]*\).*/\1/p')")
try 240 "operators" bash -c 'out=$1; shift; exec "$@" > "$out"' - "$out" "$build/bin/bench_gpu" "${head[@]}"

# A run that was cut short has left its cases, but not the list's end.
if [ -s "$out" ] && [ "$(tail -c 2 "$out" | tr -d '\n')" != ']' ]; then echo ']' >> "$out"; fi

if [ -n "$python" ]; then
  try 150 "golden models and a server" env TANDEM_BUILD="$build" "$python" -m pytest -q \
    tests/golden/test_golden_cuda.py tests/e2e/test_cuda_serve.py
else
  echo "FAILED: golden models: no python (TANDEM_PYTHON names one, scripts/setup.sh --test makes .venv)"
  failed=$((failed + 1))
fi

for device in cpu cuda; do
  try 60 "tandem-nano on $device" "$build/bin/tandem" bench --model configs/models/tandem-nano \
    --device $device -p 512 -n 64 -d 0 -b 1,16
done

# Experts on the GPU, and on the CPU, from where those of long prompts stream to the GPU.
model=$build/qwen3-30b-a3b-6
if [ -n "$python" ] && [ ! -e "$model/config.json" ]; then
  try 60 "six layers of Qwen3-30B-A3B" "$python" scripts/make_model.py --shape qwen3-30b-a3b \
    --dtype fp8 --layers 6 --out "$model"
fi
for experts in gpu cpu; do
  try 60 "its experts on the $experts" "$build/bin/tandem" bench --model "$model" --device cuda \
    --experts $experts --weights resident -p 64,512,4096,8192 -n 32 -d 512 -b 1,8 -r 2
done

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2> /dev/null)
if [ -n "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    for test in ops attn; do
      try 120 "$tool: test_cuda_$test" "$sanitizer" --tool $tool --error-exitcode 9 \
        --print-limit 5 "$build/bin/test_cuda_$test"
    done
  done
else
  echo "compute-sanitizer: SKIPPED: not installed (package cuda-sanitizer-13-0)"
fi

say "$failed failed, ${#unfinished[@]} not finished; figures in $out"
if [ ${#unfinished[@]} -gt 0 ]; then printf '  not finished: %s\n' "${unfinished[@]}"; fi
[ $failed = 0 ] && [ ${#unfinished[@]} = 0 ]
