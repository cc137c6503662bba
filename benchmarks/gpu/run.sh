#!/usr/bin/env bash
# Build hstransport on this machine with its NVIDIA GPU, test it and measure it.
#
#   benchmarks/gpu/run.sh --out DIR [--carry DIR] [--deadline SECONDS] [--grow-shm] [STEP...]
#
# Steps, all by default and in this order:
#   install   build with nvcc into a folder of its own; unpack SGLang unless Python has it
#   test      pytest -m gpu
#   sanitize  compute-sanitizer, memcheck and racecheck, over the copier's tests
#   pack      pack.py        ring     ring_gpu.py      serving  serving_gpu.py
#   seed      seed_run.py    read     read_gpu.py
#   cache     keep the compiled kernels in DIR/jit-cache.tar.xz, which --carry takes next time
#
# A step that fails does not end the run, and what it had written stays. DIR gets few files: the
# results as JSON, junit.xml, run.log. PACK_ARGS, RING_ARGS, SERVING_ARGS, SEED_ARGS and READ_ARGS
# are added to those programs' arguments, TEST_ARGS are for pytest in place of all tests; PYTHON is the interpreter; WORK is where things are installed.
# shellcheck disable=SC2329  # steps are called by their names
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
work=${WORK:-${TMPDIR:-/tmp}/hstransport-gpu}
out='' carry='' deadline=86400 grow_shm='' steps=()

usage() {
  sed -n '2,/^set/{/shellcheck/d;/^#/s/^# \{0,1\}//p}' "$0"
  exit "$1"
}
need() { [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
  case $1 in
    --out) need "$@"; out=$2; shift ;;
    --carry) need "$@"; carry=$2; shift ;;
    --deadline) need "$@"; deadline=$2; shift ;;
    --grow-shm) grow_shm=yes ;;
    -h | --help) usage 0 ;;
    install | test | sanitize | pack | ring | serving | seed | read | cache) steps+=("$1") ;;
    *) echo "run.sh: $1 is neither an option nor a step (--help)" >&2; exit 2 ;;
  esac
  shift
done
[ -n "$out" ] || { echo "run.sh: --out DIR is needed (--help)" >&2; exit 2; }
case $deadline in *[!0-9]* | '') echo "run.sh: --deadline takes whole seconds" >&2; exit 2 ;; esac
[ ${#steps[@]} -gt 0 ] || steps=(install test sanitize pack ring serving seed read cache)

mkdir -p "$out" "$work/cwd" || exit 2
out=$(cd "$out" && pwd)
[ -z "$carry" ] || carry=$(cd "$carry" && pwd) || exit 2
log=$out/run.log
lib=$work/lib site=$work/site cache=$work/cache

say() { echo "== $*" | tee -a "$log"; }

# The tree may come without its history.
if [ -z "${BENCHMARK_COMMIT:-}" ] && [ -f "$carry/commit" ] && [ ! -e "$root/.git" ]; then
  BENCHMARK_COMMIT=$(cat "$carry/commit")
  export BENCHMARK_COMMIT
fi
# hstransport as it was installed, dist-info and all, and not the source tree: `python -m` would
# find that first in the current directory.
cd "$work/cwd" || exit 2
export PYTHONPATH=$lib:$site${PYTHONPATH:+:$PYTHONPATH} PATH=$lib/bin:$PATH
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export TVM_FFI_CACHE_DIR=$cache/tvm-ffi TRITON_CACHE_DIR=$cache/triton
use_site() {
  [ -d "$site/sglang" ] || return 0
  export SGLANG_IS_FLASHINFER_AVAILABLE=false # the package there is a stand-in
  export PYTHONPYCACHEPREFIX=$cache/pyc       # the machine's own folders may not be written
  unset PYTHONDONTWRITEBYTECODE
}
use_site

unpack_site() {
  if [ -d "$site" ] || "$python" -c 'import sglang' 2>/dev/null; then return 0; fi
  if [ ! -f "$carry/site.tar.xz" ]; then
    echo "SGLang is not installed and there is no site.tar.xz in --carry '$carry'"
    return 1
  fi
  mkdir -p "$site.new" "$cache"
  "$python" -m tarfile -e "$carry/site.tar.xz" "$site.new" || return 1
  if [ -f "$carry/jit-cache.tar.xz" ]; then
    "$python" -m tarfile -e "$carry/jit-cache.tar.xz" "$cache"
  fi
  mv "$site.new" "$site"
  use_site
  # Every process that imports these would compile them again, one file after the other.
  "$python" - "$site" <<'PY' >/dev/null 2>&1
import compileall, importlib.util, sys
names = """torch sympy triton mpmath networkx numpy huggingface_hub aiohttp requests urllib3 PIL
torchvision scipy"""
specs = filter(None, map(importlib.util.find_spec, names.split()))
for folder in [sys.argv[1], *(s.submodule_search_locations[0] for s in specs)]:
    compileall.compile_dir(folder, quiet=2, workers=0)
PY
  return 0
}

run_install() {
  unpack_site || return 1
  rm -rf "$lib"
  "$python" -m pip install --no-build-isolation --no-deps --no-index --disable-pip-version-check \
    --target "$lib" -C "build-dir=$work/build" -v "$root" || return 1
  # With what is missing named here, and not by some later step.
  "$python" -c 'import hstransport._core, hstransport_consumer, sglang, torch, zmq, zstandard
from importlib.metadata import entry_points
assert "hstransport" in {e.name for e in entry_points(group="sglang.srt.plugins")}
print(hstransport.__file__, "SGLang", sglang.__version__, "torch", torch.__version__)'
}

pytest() { "$python" -m pytest -p no:cacheprovider -c "$root/pyproject.toml" "$@"; }

# shellcheck disable=SC2086  # several words on purpose
run_test() { pytest -m gpu --junitxml "$out/junit.xml" --durations=15 ${TEST_ARGS:-"$root/tests"}; }

# Not those that are wrong on purpose or long. Those with torch load so many kernels that the tool
# needs minutes for each process; replays of a graph do not come to an end under it.
copier_tests='not long and not early and not error and not 40- and not torch and not replay'
run_sanitize() {
  local tool status=0
  for tool in memcheck racecheck; do
    echo "compute-sanitizer $tool"
    timeout -k 10 "$((limit / 2))" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      --target-processes all "$python" -m pytest -p no:cacheprovider -c "$root/pyproject.toml" \
      -m gpu -v -k "$copier_tests" "$root/tests/test_gpu_copier.py" || status=$?
  done
  return "$status"
}

bench() { # bench PROGRAM RESULT ARGUMENTS
  local program=$root/benchmarks/$1 result
  [ -f "$program" ] || { echo "there is no $1 yet"; return 1; }
  result=$out/$2_$(cd "$root/benchmarks" && "$python" -c 'from common import card; print(card())').json
  # shellcheck disable=SC2086  # several words on purpose
  "$python" "$program" --out "$result" $3
}
# Made-up states, which are as wide as those of a large model: a model's own need the internet.
run_pack() {
  bench pack.py pack "--synthetic 7168 --threads 1 2 4 8 16 --consumers 8 --ring 2GiB --rounds 3 --no-others --no-read \
    --place /dev/shm ${PACK_ARGS:-}"
}
run_ring() { bench ring_gpu.py ring "${RING_ARGS:-}"; }
# These two stop by themselves and still say what they have, well before they would be stopped.
run_serving() { bench serving_gpu.py serving "--limit-s $((limit - 130)) ${SERVING_ARGS:-}"; }
run_seed() { bench seed_run.py seed_run "--limit-s $((limit - 170)) ${SEED_ARGS:-}"; }
run_read() { bench read_gpu.py read "${READ_ARGS:-}"; }

run_cache() {
  local archive=$out/jit-cache.tar.xz folders=()
  cd "$cache" || return 1
  for folder in tvm-ffi triton; do [ ! -d "$folder" ] || folders+=("$folder"); done
  "$python" -m tarfile -c "$archive" "${folders[@]}" || return 1
  ls -l "$archive"
  if [ "$(stat -c %s "$archive")" -gt $((16 << 20)) ]; then
    rm "$archive"
    echo "more than 16 MiB: not kept"
    return 1
  fi
}

limit_of() { # seconds that a step may take
  case $1 in
    serving | seed) echo 560 ;;
    test) echo 300 ;;
    pack) echo 400 ;;
    sanitize) echo 420 ;;
    *) echo 240 ;;
  esac
}

status=0 table=()
step() {
  local name=$1 left=$((deadline - SECONDS)) begun=$SECONDS rc pid watch before
  limit=$(limit_of "$name")
  [ "$left" -ge "$limit" ] || limit=$left
  if [ "$limit" -lt 20 ]; then
    say "$name: no time left"
    table+=("$name: not run, no time left") status=1
    return 0
  fi
  say "$name (at most $limit s)"
  before=$(wc -l <"$log")
  # In a process group of its own, which is told to end when its time is over: the program of the
  # step cleans up, this shell waits for it.
  set -m
  (trap : TERM; run_"$name") >>"$log" 2>&1 &
  pid=$!
  (
    sleep "$limit"
    echo "== $name: $limit s are over" >>"$log"
    kill -TERM -- "-$pid"
    sleep 20
    kill -KILL -- "-$pid"
  ) 2>/dev/null &
  watch=$!
  set +m
  wait "$pid"
  rc=$?
  kill -KILL -- "-$watch" "-$pid" 2>/dev/null
  wait "$watch" 2>/dev/null
  tail -n "+$((before + 1))" "$log" | tail -n "$([ "$rc" -eq 0 ] && echo 4 || echo 40)" | cut -c1-300
  table+=("$name: $([ "$rc" -eq 0 ] && echo ok || echo "FAILED, exit status $rc"), $((SECONDS - begun)) s")
  [ "$rc" -eq 0 ] || status=1
}

say "$(date -u +%FT%TZ) commit ${BENCHMARK_COMMIT:-of the checkout}"
{ nvidia-smi; nproc; free -g; df -h /dev/shm "$work"; nvcc --version; } >>"$log" 2>&1
df -h /dev/shm | tail -1
# A machine whose memory grows with its use says too little of it when /dev/shm is mounted.
[ -z "$grow_shm" ] || mount -o remount,size=100G /dev/shm || say "/dev/shm cannot be made larger"

installed=$lib/hstransport/__init__.py
[ "${steps[0]}" = install ] || [ -f "$installed" ] || steps=(install "${steps[@]}")
for name in "${steps[@]}"; do
  if [ "$name" != install ] && [ ! -f "$installed" ]; then
    table+=("$name: not run, nothing is installed") status=1
    continue
  fi
  use_site
  step "$name"
done

say "results in $out"
"$python" "$root/benchmarks/gpu/summary.py" "$out"
printf '%s\n' "${table[@]}" | tee -a "$log"
exit "$status"
