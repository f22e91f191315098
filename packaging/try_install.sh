#!/usr/bin/env bash
# The built wheel as people meet it: pipx, an empty home, and no compiler; then the engine, and a model that answers.
#   packaging/try_install.sh dist/edgellm-*.whl
# About a minute. The engine's wheel comes from pip's cache (the tests' own environment put it there), else it is compiled.
set -euo pipefail

if [ -z "${TRY_INSTALL:-}" ] && command -v timeout >/dev/null; then
  TRY_INSTALL=1 exec timeout --kill-after=10 1500 "$0" "$@"
fi

wheel=$(realpath "$1")
python=$(realpath "$(command -v "${PYTHON:-python3}")")
work=$(mktemp -d)
home=$work/home server=
finish() {
  [ -z "$server" ] || kill "$server" 2>/dev/null || true
  [ ! -f "$home/pid" ] || kill "$(cat "$home/pid")" 2>/dev/null || true
  rm -rf "$work"
}
trap finish EXIT
cd "$work"

# Only what says how packages are reached comes along.
carried=()
while IFS= read -r -d '' pair; do
  case ${pair%%=*} in PIP_* | SSL_* | REQUESTS_CA_BUNDLE | *_proxy | *_PROXY) carried+=("$pair") ;; esac
done < <(env -0)

path=/usr/bin:/bin
person() { # person COMMAND...: in an environment of their own
  env -i ${carried[@]+"${carried[@]}"} "HOME=$home" "PATH=$home/.local/bin:$path" LANG=C.UTF-8 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 "PIP_CACHE_DIR=$cache" "$@" </dev/null
}

ok() { echo "ok: $*"; }
fail() {
  echo "FAILED: $1"
  cat said
  exit 1
}
expect() { # expect STATUS WHAT PATTERN COMMAND...: the exit status and a line of what it says
  local status=$1 what=$2 pattern=$3 got=0
  shift 3
  person "$@" >said 2>&1 || got=$?
  [ "$got" = "$status" ] || fail "$what: exit status $got, not $status"
  grep -qE -- "$pattern" said || fail "$what: it does not say: $pattern"
  ok "$what"
}

"$python" -m venv tools
cache=$(tools/bin/pip cache dir 2>/dev/null) || cache=$work/cache
if ! tools/bin/pip install --quiet --disable-pip-version-check pipx 2>said; then
  echo "not run: the wheel through pipx (pipx could not be installed)"
  exit 0
fi
version=$("$python" - "$wheel" <<'END'
import re, sys, zipfile
source = zipfile.ZipFile(sys.argv[1]).read("edgellm/engine/build.py").decode()
print(re.search(r'^ENGINE_VERSION: Final = "(.*)"', source, re.M)[1])
END
)

# --- pipx, then a machine that has Python and nothing to compile with ----------------------------

mkdir "$home"
began=$SECONDS
expect 0 'pipx install' 'edgellm' "$PWD/tools/bin/pipx" install --python "$python" "$wheel"
echo "    $((SECONDS - began)) s"

mkdir bare
ln -s "$python" bare/python3
full=$path path=$work/bare
export_cache=$cache cache=$work/empty-cache
expect 1 'without an engine, doctor names the command' '^ *edgellm setup$' edgellm doctor
expect 1 'chat does too' 'try: edgellm setup' edgellm chat -p hi
expect 1 'without a compiler, setup names what to install' 'try: .*(build-essential|xcode-select)' edgellm setup --yes
expect 0 'ls says what to do first' 'edgellm pull starter' edgellm ls
expect 0 'pull starter' 'starter is here' edgellm pull starter
expect 0 'plan' 'n_gpu_layers' edgellm plan starter --vram 6GiB
folder=$(dirname "$(find "$home" -name 'SmolLM2*.gguf' | head -1)")
"$python" -m http.server --bind 127.0.0.1 --directory "$folder" 0 >served 2>&1 &
server=$!
for _ in $(seq 50); do
  if grep -q 'port [0-9]' served; then break; fi
  sleep 0.1
done
port=$(sed -n 's/.* port \([0-9]*\).*/\1/p' served)
expect 0 'pull from an address' 'SmolLM2' edgellm pull "http://127.0.0.1:$port/SmolLM2-135M-Instruct.Q4_1.gguf"
kill "$server"
server=
expect 0 'ls lists both' 'starter' edgellm ls
expect 0 'verify' '' edgellm verify
path=$full cache=$export_cache

# --- the engine by `edgellm setup`, from a wheel -------------------------------------------------

tools/bin/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir engine "llama-cpp-python==$version" >said 2>&1 ||
  fail 'the engine is built'
expect 0 'setup proves the engine' 'the starter answered' edgellm setup --yes --source "$(echo "$PWD"/engine/*.whl)"
person edgellm doctor >said 2>&1 || true
grep -q "llama-cpp-python $version loads" said || fail 'doctor sees the engine'
ok 'doctor sees the engine'
expect 0 'a model answers' '[[:alpha:]]{2}' edgellm chat -p hi --max-tokens 8 --temperature 0
echo damaged >"llama_cpp_python-$version.tar.gz"
expect 1 'a setup that fails says so' 'nothing was changed' edgellm setup --yes --source "$PWD/llama_cpp_python-$version.tar.gz"
expect 0 'and the old engine answers still' '[[:alpha:]]{2}' edgellm chat -p hi --max-tokens 8 --temperature 0
expect 0 'pipx uninstall' 'uninstalled' "$PWD/tools/bin/pipx" uninstall edgellm

# --- the engine as an extra ----------------------------------------------------------------------

home=$work/home2
mkdir "$home"
expect 0 'pipx install with the extras' 'edgellm' "$PWD/tools/bin/pipx" install --python "$python" "${wheel}[engine,starter]"
expect 0 'a model answers there' '[[:alpha:]]{2}' edgellm chat -p hi --max-tokens 8 --temperature 0

# --- two people with a key each, on another port, by docs/service.md -----------------------------

mkdir -p "$home"/.config/edgellm "$home"/.local/share/edgellm "$home"/.local/state/edgellm "$home"/.cache/edgellm
(
  umask 077
  echo 'EDGELLM_SERVE_API_KEY=alice:sk-alice-0001,bob:sk-bob-0002' >"$home/.config/edgellm/serve.env"
)
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
expect 0 'the port is a setting' "serve.port = $port" edgellm config set serve.port "$port"
unit=$(find "$home" -path '*share/edgellm/edgellm.service')
[ -n "$unit" ] || fail 'the unit is in the wheel'
# shellcheck disable=SC2016  # the shell inside expands it
person sh -c 'echo $$ >~/pid; exec env "$(cat ~/.config/edgellm/serve.env)" edgellm serve' >served 2>&1 &
server=$!
cat >ask.py <<'END'
import json, sys, time, urllib.error, urllib.request

port, key = sys.argv[1:]
headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
body = {"model": "starter", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "Say hello."}]}
url = f"http://127.0.0.1:{port}/v1/chat/completions"
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
for _ in range(300):
    try:
        with open_url(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as got:
            print(json.load(got)["choices"][0]["message"]["content"])
            break
    except urllib.error.HTTPError as error:
        sys.exit(f"HTTP {error.code}")
    except urllib.error.URLError:
        time.sleep(0.1)
END
expect 0 'alice is answered' '[[:alpha:]]{2}' "$python" ask.py "$port" sk-alice-0001
expect 0 'bob is answered' '[[:alpha:]]{2}' "$python" ask.py "$port" sk-bob-0002
expect 1 'nobody else is' 'HTTP 401' "$python" ask.py "$port" sk-mallory
for name in alice bob; do grep -q "\"key\":\"$name\"" served || fail "the log names $name"; done
kill -TERM "$(cat "$home/pid")"
wait "$server" || fail 'the server ends well'
server=
ok 'the log names both, and the server ends well'
