#!/bin/bash
# Packs what a machine with a GPU needs to run scripts/gpu/stage.sh, as one archive that travels
# beside the checkout: programs, test programs, the kernels' library, a second one that has what older
# and GeForce GPUs run (as PTX, which ARCH and later ones translate), and every shared library that is
# neither libc's nor the driver's. Run it where nvcc and what scripts/setup.sh installs are.
# usage: scripts/gpu/pack.sh [-o FILE] [ARCH]             builds for ARCH in build-test/gpu; default: 90a
#        scripts/gpu/pack.sh [-o FILE] --built BUILD      what BUILD has, without PTX
#        scripts/gpu/pack.sh [-o FILE] --emulator BUILD   BUILD's programs with the GPU emulator
# FILE is .gpu.tar.xz by default, which stage.sh unpacks.
set -euo pipefail
cd "$(dirname "$0")/../.."

most_bytes=20000000
out=.gpu.tar.xz arch=90a emulator=false is_built=false build=build-test/gpu library=libtandem_cuda.so
while [ $# -gt 0 ]; do
  case $1 in
    -o) out=${2:?-o: name a file} && shift 2 ;;
    --built | --emulator)
      is_built=true build=${2:?$1: name a build folder}
      if [ "$1" = --emulator ]; then emulator=true library=libtandem_cuda_emu.so; fi
      shift 2
      ;;
    -*) sed -n '/^# usage/,/^# FILE/s/^# //p' "$0" >&2 && exit 2 ;;
    *) arch=$1 && shift ;;
  esac
done

# Flags are those of scripts/test.sh's release, so that ccache has what that compiled. PTX is in the second
# library alone; from 89 on there are instructions for FP8.
if $is_built; then
  arch=$(if $emulator; then echo emulator; else sed -n 's/^TD_CUDA_ARCHS:[^=]*=//p' "$build/CMakeCache.txt"; fi)
else
  scripts/setup.sh --test
  flags=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DTD_WERROR=ON -DTD_CUDA=ON -DTD_CUDA_EMULATOR=OFF)
  if command -v ccache > /dev/null; then flags+=(-DCMAKE_C{,XX}_COMPILER_LAUNCHER=ccache); fi
  ptx=89
  if [[ $arch =~ ^8[0-8] ]]; then ptx=80; fi
  cmake -S . -B $build "${flags[@]}" -DTD_CUDA_ARCHS="$arch" -DTD_CUDA_PTX=OFF
  ninja -C $build tandem_cuda gpu_tests
  cmake -S . -B $build/ptx "${flags[@]}" -DTD_CUDA_ARCHS= -DTD_CUDA_PTX=$ptx
  ninja -C $build/ptx tandem_cuda
fi
mapfile -t tests < "$build/gpu_tests.txt" # the label gpu
programs=(tandem "${tests[@]}")

dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir"/gpu/{bin,lib/cxx}
for f in "${programs[@]}"; do strip -o "$dir/gpu/bin/$f" "$build/bin/$f"; done
strip -o "$dir/gpu/bin/$library" "$build/bin/$library"
if ! $is_built; then strip -o "$dir/gpu/bin/libtandem_cuda_ptx.so" "$build/ptx/bin/$library"; fi
cp "$build/gpu_tests.txt" "$dir/gpu/"

# The C++ runtime lies apart: only a machine that has none is to use it.
ldd "$dir"/gpu/bin/* | awk '$2 == "=>" {print $1, $3}' | sort -u | while read -r name path; do
  case $name in
    libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | libcuda.so.*) ;;
    libstdc++.so.* | libgcc_s.so.*) cp -L "$path" "$dir/gpu/lib/cxx/$name" ;;
    *)
      if [ "$path" = not ]; then
        echo "pack: $name, which the programs need, is not installed here" >&2
        exit 1
      fi
      cp -L "$path" "$dir/gpu/lib/$name"
      ;;
  esac
done

nvcc=$(sed -n 's/^TD_NVCC:[^=]*=//p' "$build/CMakeCache.txt" 2> /dev/null || true)
cuda=$($emulator || "${nvcc:-nvcc}" --version | sed -n 's/.*release \([^,]*\).*/\1/p')
commit=$(git describe --always --dirty 2> /dev/null || echo unknown)
printf '{"commit": "%s", "archs": "%s", "cuda": "%s", "library": "%s", "emulator": %s}\n' \
  "$commit" "$arch" "$cuda" "$library" $emulator > "$dir/gpu/bundle.json"

# The programs have most of their code in common: a dictionary of several of them stores it once.
tar -C "$dir" -c gpu | xz -T1 --lzma2=preset=0,dict=32MiB > "$out"
n_bytes=$(stat -c %s "$out")
echo "pack: $out: $n_bytes bytes, code for $arch"
if [ "$n_bytes" -ge $most_bytes ]; then
  echo "pack: $out is larger than $most_bytes bytes: name fewer architectures" >&2
  exit 1
fi
