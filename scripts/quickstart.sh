#!/bin/bash
# From a fresh clone to a server that answers: installs what is needed, builds tandem, gets the default
# model and serves it on port 8080. Arguments go to `tandem serve`: --port N, --model DIR, ...
# Where there is an NVIDIA GPU, and nvcc to build kernels for it, the GPU computes if the model fits.
set -euo pipefail
caller=$PWD
cd "$(dirname "$0")/.."
root=$PWD

nano=configs/models/tandem-nano
tiny=.models/tiny
port=8080
model=
arguments=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    --port) port=${2:-} ;;
    --port=*) port=${1#*=} ;;
    --model | -m) model=${2:-} ;;
    --model=*) model=${1#*=} ;;
  esac
  shift
done

if [ -n "$model" ]; then
  kind=given
elif [ -n "$(ls $nano/*.safetensors 2> /dev/null)" ]; then
  kind=nano model=$nano
else
  kind=random model=$tiny
fi

if [ $kind = random ]; then scripts/setup.sh --test; else scripts/setup.sh; fi

# The first GPU's architecture as nvcc names it; nothing where no driver answers, or where the GPU is
# older than what the kernels need.
architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -1) || return 0
  case $capability in
    [0-9]*.[0-9]*) ;;
    *) return 0 ;;
  esac
  capability=${capability/./}
  if [ "$capability" -lt 80 ]; then return 0; fi
  if [ "$capability" = 90 ]; then echo 90a; else echo "$capability"; fi
}

targets=(tandem)
settings=()
arch=$(architecture)
if [ -n "$arch" ] && { command -v nvcc || [ -x /usr/local/cuda/bin/nvcc ]; } > /dev/null; then
  echo "quickstart: a GPU is here (sm_$arch), with nvcc to build for it"
  targets+=(tandem_cuda)
  settings+=(-DTD_CUDA=ON "-DTD_CUDA_ARCHS=$arch")
elif [ -n "$arch" ] || [ -e /dev/nvidia0 ]; then
  lacks=nvcc
  if [ -z "$arch" ]; then lacks="nvidia-smi that tells a compute capability of 8.0 or more"; fi
  echo "quickstart: a GPU is here, but no $lacks: the CPU computes; see kernels/cuda/INSTALL.md"
fi

build() {
  cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DTD_WERROR=OFF -DTD_ISAS=native \
    -DTD_CUDA_EMULATOR=OFF "${settings[@]}" > "$log" 2>&1 && ninja -C build "${targets[@]}" >> "$log" 2>&1
}

echo "quickstart: building"
mkdir -p build
log=build/quickstart.log
built=yes
build || built=no
if [ $built = no ] && [ ${#settings[@]} -gt 0 ]; then
  mv $log build/quickstart-cuda.log
  echo "quickstart: the kernels for sm_$arch are not built (see build/quickstart-cuda.log; it takes CUDA" \
    "12.8 or newer): the CPU computes"
  targets=(tandem)
  settings=(-DTD_CUDA=OFF)
  if build; then built=yes; fi
fi
if [ $built = no ]; then
  tail -30 $log >&2
  echo "quickstart: error: the build failed; the whole log is $log" >&2
  exit 1
fi

if [ $kind = random ] && [ ! -f $tiny/config.json ]; then
  echo "quickstart: making a model of random weights in $tiny"
  rm -rf $tiny
  .venv/bin/python scripts/make_model.py --shape tiny --out $tiny
fi
if [ $kind != given ]; then
  arguments=(--model "$root/$model" "${arguments[@]}")
fi

echo
echo "Serving $model. In another terminal:"
cat << HINT

  curl http://127.0.0.1:$port/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 50}'

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:$port/v1", api_key="none")
  answer = client.chat.completions.create(
      model="$(basename "$model")", messages=[{"role": "user", "content": "Hello!"}])
  print(answer.choices[0].message.content)

HINT
if [ $kind = random ]; then
  echo "NOTE: this model's weights are random numbers, and so are its answers: it shows that tandem"
  echo "runs. For real answers give it a real checkpoint: scripts/quickstart.sh --model DIR"
  echo
fi
echo "Ctrl-C stops the server."
cd "$caller" # a path among the arguments is the caller's
exec "$root/build/bin/tandem" serve "${arguments[@]}"
