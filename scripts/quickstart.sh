#!/bin/bash
# From a fresh clone to a server that answers: installs what is needed, builds tandem, gets the default
# model and serves it on port 8080. Arguments go to `tandem serve`: --port N, --model DIR, ...
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

echo "quickstart: building"
mkdir -p build
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DTD_WERROR=OFF > build/quickstart.log 2>&1 &&
  ninja -C build tandem >> build/quickstart.log 2>&1 || {
  tail -30 build/quickstart.log >&2
  echo "quickstart: error: the build failed; the whole log is build/quickstart.log" >&2
  exit 1
}

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
