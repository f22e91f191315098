#!/usr/bin/env bash
# Each file here through its own linter. A linter that is not installed is named, never passed over in silence.
set -euo pipefail
cd "$(dirname "$0")/.."

failed=0
run() { # run TOOL WHAT COMMAND...
  local tool=$1 what=$2
  shift 2
  if ! command -v "$tool" >/dev/null; then
    echo "not run: $what ($tool is not installed)"
  elif "$@"; then
    echo "ok: $what"
  else
    echo "FAILED: $what"
    failed=1
  fi
}

run python 'completions, manual page and reference are the command line as it is' \
  python packaging/generate.py --check
run python 'licences of what is installed' python packaging/licences.py --check
run hadolint 'container files' hadolint --config packaging/docker/hadolint.yaml \
  packaging/docker/cpu.Dockerfile packaging/docker/cuda.Dockerfile
run yamllint 'YAML' yamllint --strict -d '{extends: relaxed, rules: {line-length: {max: 120}}}' \
  packaging .github mkdocs.yml
run shellcheck 'shell scripts' shellcheck .ci/run packaging/check.sh packaging/try_install.sh
run actionlint 'workflows' actionlint
run bash 'bash completion' bash -n packaging/completions/edgellm.bash
run zsh 'zsh completion' zsh -n packaging/completions/_edgellm
run fish 'fish completion' fish --no-execute packaging/completions/edgellm.fish
run pwsh 'PowerShell completion' pwsh -NoProfile -Command \
  "\$null = [scriptblock]::Create((Get-Content -Raw packaging/completions/edgellm.ps1))"
run mandoc 'manual page' mandoc -T lint -W warning packaging/man/edgellm.1
run python 'launchd agent' python -c \
  'import plistlib; plistlib.load(open("packaging/launchd/edgellm.serve.plist", "rb"))'
run ruby 'Homebrew formula' ruby -c packaging/homebrew/edgellm.rb
run promtool 'Prometheus configuration' promtool check config --syntax-only packaging/prometheus.yml

# The plugin needs no running engine for this; the client alone has no such command.
# shellcheck disable=SC2329  # called by run
compose() {
  EDGELLM_API_KEY=any docker compose -f packaging/compose.yaml config --quiet
}
if docker compose version >/dev/null 2>&1; then
  run docker 'compose file' compose
else
  echo 'not run: compose file (docker compose is not installed)'
fi

# The unit names a program below the home folder: give it one to find.
# shellcheck disable=SC2329  # called by run
verify_unit() {
  local home
  home=$(mktemp -d)
  install -D /bin/true "$home/.local/bin/edgellm"
  HOME=$home XDG_RUNTIME_DIR=$home systemd-analyze verify --user packaging/systemd/edgellm.service
  rm -rf "$home"
}
run systemd-analyze 'systemd unit' verify_unit
echo 'not run: brew audit, plutil, launchctl, Task Scheduler (other systems)'

exit "$failed"
