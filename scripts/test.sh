#!/bin/bash
# Installs what is needed, builds tandem three ways and runs every test there is:
#   release  warnings are errors; unit tests, fuzz corpora, source rules; pytest: goldens, end to end
#   asan     AddressSanitizer (leaks too) and UBSan: unit tests, fuzz corpora; pytest
#   tsan     ThreadSanitizer: what has threads of the unit tests and of pytest
#   fuzz     clang and libFuzzer: each target for a few seconds from its corpus
#   quick    for a change under way: what takes under ten minutes of release on two cores; not among all
# usage: scripts/test.sh [release|asan|tsan|fuzz|quick]...      default: all but quick
# The last line is "N passed, N failed" over everything; the exit status is 0 when nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.."

root=$PWD
work=$root/build-test
results=$work/results
python=$root/.venv/bin/python
jobs=$(nproc)
at_once=$((jobs + 1)) # tests of CTest, some of which wait
files_at_once=$((jobs < 4 ? jobs + 1 : 4)) # of pytest; many of them wait
fuzz_seconds=${FUZZ_SECONDS:-5}
[ $# -gt 0 ] || set -- release asan tsan fuzz
variants=("$@")
started=$SECONDS
# Where speed is not the point asserts stay on; warnings differ with the optimization, and release
# has judged them.
checked=(-DCMAKE_BUILD_TYPE=RelWithDebInfo -DTD_WERROR=OFF "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1"
  "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -g1")

say() { printf '\n== %s [%d s]\n' "$*" $((SECONDS - started)); }

# count NAME PASSED FAILED: a result that no test runner reports.
count() { echo "$2 $3" > "$results/$1.count"; }

finish() {
  say "results"
  python3 scripts/sum_results.py "$results"
  exit
}

# ThreadSanitizer needs the address space where it expects it.
run_fixed() { if setarch -R true 2> /dev/null; then setarch -R "$@"; else "$@"; fi; }

# Python's compiled files are kept: every process of pytest reads all of the test files.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=$work/pycache

launcher() {
  if command -v ccache > /dev/null; then echo -DCMAKE_C{,XX}_COMPILER_LAUNCHER=ccache; fi
}

# build VARIANT CMAKE-ARGUMENTS...: goes on after errors, so that one folder's mistake hides nothing.
# Builds everything, or what the array targets names, or what pytest drives and the array tested, of
# CTest's arguments, chooses: a program has the name of its test.
targets=()
tested=()
build() {
  local variant=$1 wanted=("${targets[@]}")
  shift
  say "$variant: build"
  if cmake -S . -B "$work/$variant" -G Ninja $(launcher) "$@" > "$work/$variant.cmake.log" 2>&1; then
    if [ ${#tested[@]} -gt 0 ]; then
      mapfile -t wanted < <(echo driven
        ctest --test-dir "$work/$variant" -N "${tested[@]}" | sed -nE 's/^ *Test +#[0-9]+: //p')
    fi
    ninja -C "$work/$variant" -k 0 "${wanted[@]}" > "$work/$variant.build.log" 2>&1 && return 0
    grep -E -A12 'FAILED|error:|warning:|undefined reference' "$work/$variant.build.log" | head -150
  else
    tail -40 "$work/$variant.cmake.log"
  fi
  echo "$variant: the build failed: see $work/$variant.*.log"
  count "$variant-build" 0 1
  return 1
}

# run_ctest VARIANT CTEST-ARGUMENTS...
run_ctest() {
  local variant=$1 report=$results/$1-ctest.xml
  shift
  say "$variant: ctest"
  run_fixed ctest --test-dir "$work/$variant" -j "$at_once" --output-on-failure --no-tests=error \
    --output-junit "$report" "$@" || [ -s "$report" ] || count "$variant-ctest" 0 1
}

# run_pytest VARIANT PYTEST-ARGUMENTS...: tests in what the array test_files names, which each process reads.
test_files=(tests)
run_pytest() {
  local variant=$1 report=$results/$1-pytest.xml
  shift
  say "$variant: pytest"
  if [ ! -x "$work/$variant/bin/tandem" ]; then
    echo "$variant: there is no program to test"
    count "$variant-pytest" 0 1
    return
  fi
  TANDEM_BUILD=$work/$variant TANDEM_BIN=$work/$variant/bin/tandem run_fixed "$python" -m pytest "${test_files[@]}" \
    -n "$files_at_once" --dist loadfile --no-loadscope-reorder -q -rfEs --durations=10 --durations-min=5 \
    -p no:cacheprovider --timeout 600 --junitxml "$report" "$@" || [ -s "$report" ] || count "$variant-pytest" 0 1
}

# Sanitizers write their reports to files, so that one in a child process or in a process that a
# test killed is seen as well. Each is a failure.
sanitized() {
  local variant=$1 reports=$work/$1-reports
  shift
  rm -rf "$reports"
  mkdir -p "$reports"
  ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1:log_path=$reports/asan" \
    UBSAN_OPTIONS="print_stacktrace=1:log_path=$reports/ubsan" \
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:log_path=$reports/tsan" "$@"
  # A process killed while it looks for leaks leaves a remark that is no report.
  local found
  mapfile -t found < <(grep -rlE 'ERROR:|WARNING:|runtime error:' "$reports")
  if [ ${#found[@]} -gt 0 ]; then
    say "$variant: ${#found[@]} sanitizer reports"
    for report in "${found[@]}"; do head -60 "$report"; done | head -400
    count "$variant-sanitizer-reports" 0 ${#found[@]}
  fi
}

# The GPU code is for the one architecture that has all of it, since it is compiled and not run. Kernels that this CPU
# does not choose are compiled with -O1, those that it cannot run with -O0; sanitizers see its own kernels alone.
build_release() {
  build release -DCMAKE_BUILD_TYPE=Release -DTD_WERROR=ON -DTD_CUDA_ARCHS=90a -DTD_CUDA_PTX=OFF \
    -DTD_CUDA_UNOPTIMIZED=ON -DTD_FOR_THIS_CPU=ON
}

test_release() {
  run_ctest release
  run_pytest release
}

# Release's build folder, so that either finds what the other has built.
build_quick() { build_release; }

test_quick() {
  run_ctest release -LE '^slow$'
  run_pytest release -m "not slow"
  say "quick: left out: sanitizers, fuzzing, and what is marked slow"
  ctest --test-dir "$work/release" -N -L '^slow$' | sed -nE 's/^ *Test +#[0-9]+: /  /p'
  grep -lE 'mark\.slow' -r tests --include='*.py' | grep -v conftest | sed 's/^/  /'
}

# sanitized_tests VARIANT PYTEST-ARGUMENTS...: also what the array tested chooses of CTest's.
sanitized_tests() {
  local variant=$1
  shift
  run_ctest "$variant" "${tested[@]}"
  run_pytest "$variant" "$@"
}

# Which tests run here and under ThreadSanitizer, each says itself: labels of CTest, marks of pytest
# (tests/README.md).
in_asan=(-LE '^(source|again|no-asan)$')
in_tsan=(-LE '^(source|again|no-tsan)$')

build_asan() {
  local tested=("${in_asan[@]}")
  build asan "${checked[@]}" -DTD_ISAS=native -DTD_SANITIZE=address
}

test_asan() {
  local tested=("${in_asan[@]}")
  TANDEM_STRINGS=500 sanitized asan sanitized_tests asan -m "not no_asan"
}

# Unit tests know their sanitizer and repeat less (tests/unit/sanitized.h), and so do those of pytest
# (SANITIZED in tests/e2e/serving.py).
build_tsan() {
  local tested=("${in_tsan[@]}")
  build tsan "${checked[@]}" -DTD_ISAS=native -DTD_SANITIZE=thread
}

test_tsan() {
  local tested=("${in_tsan[@]}") test_files
  mapfile -t test_files < <(grep -rlE 'mark\.tsan|tsan=' tests --include='test_*.py')
  sanitized tsan sanitized_tests tsan -m tsan
}

# fuzz_one NAME: one target, from its corpus.
fuzz_one() {
  local name=$1 corpus=$work/fuzz/corpus/$1 outcome="1 0" log=$work/fuzz/$1.log
  mkdir -p "$corpus" "$work/fuzz/artifacts"
  # No parser of clients' data may need a deep stack; ASan's frames are several times as large. A
  # template's render may (src/text/template.h).
  [ "$name" = fuzz_template ] || ulimit -S -s 512
  # New inputs go to the first folder; the committed corpus is only read.
  if run_fixed "$work/fuzz/bin/$name" -max_total_time="$fuzz_seconds" -max_len=1000000 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="$work/fuzz/artifacts/$name-" "$corpus" "tests/fuzz/corpus/$name" > "$log" 2>&1; then
    echo "$name: $(tail -1 "$log")"
  else
    outcome="0 1"
    { echo "$name:"; tail -60 "$log"; }
  fi
  # shellcheck disable=SC2086
  count "fuzz-$name" $outcome
}

build_fuzz() {
  local target targets=()
  if ! command -v clang > /dev/null; then
    echo "fuzz: SKIPPED: no clang"
    return
  fi
  for target in tests/fuzz/fuzz_*.c; do targets+=("$(basename "$target" .c)"); done
  build fuzz "${checked[@]}" -DCMAKE_C_COMPILER=clang -DTD_FUZZ=ON -DTD_SANITIZE=address
}

test_fuzz() {
  local target
  say "fuzz: $fuzz_seconds s each"
  for target in "$work"/fuzz/bin/fuzz_*; do
    [ -x "$target" ] || continue
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do wait -n; done
    fuzz_one "$(basename "$target")" &
  done
  wait
}

for variant in "${variants[@]}"; do
  case $variant in
    release | asan | tsan | fuzz | quick) ;;
    *)
      echo "usage: scripts/test.sh [release|asan|tsan|fuzz|quick]..." >&2
      exit 2
      ;;
  esac
done

rm -rf "$results"
mkdir -p "$results"
say "setup"
if ! scripts/setup.sh --test; then
  count setup 0 1
  # Without Python nothing can be added up.
  command -v python3 > /dev/null && finish
  echo "0 passed, 1 failed"
  exit 1
fi

# Each variant is built, with what time is left, while the tests of the one before it run: many of them wait.
begin_build() {
  renice -n 19 $BASHPID > /dev/null
  "build_$1" > "$work/$1.out" 2>&1
}

"build_${variants[0]}"
for i in "${!variants[@]}"; do
  variant=${variants[i]} next=${variants[i + 1]:-}
  if [ -n "$next" ]; then begin_build "$next" & fi
  "test_$variant"
  if [ -n "$next" ]; then
    wait
    cat "$work/$next.out"
  fi
done
finish
