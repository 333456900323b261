#!/bin/sh
# Installs the clients of tests/clients beside the virtual environment, not in it: each has wishes
# of its own about the versions of others. One that cannot be installed is named, and its test says so.
#   sh scripts/install_clients.sh [VENV]      (default .venv)
set -eu
venv="${1:-.venv}"
clients="$venv/clients"
if [ -f "$clients/done" ]; then
	exit 0
fi
"$venv/bin/python" -m venv "$clients"
install() {
	"$clients/bin/python" -m pip --disable-pip-version-check install -q "$@"
}
set -- "litellm>=1.80" "langchain-openai>=1.0" "instructor>=1.11" "pydantic-ai-slim[openai]>=1.0"
install "$@" || for package in "$@"; do
	install "$package" || echo "$package cannot be installed here; its test is skipped" >&2
done
if command -v npm >/dev/null; then
	npm install --silent --no-audit --no-fund --prefix "$clients" \
		"openai@>=6" "ai@>=5" "@ai-sdk/openai-compatible@>=1" "zod@>=4" ||
		echo "npm cannot install here; the tests of its clients are skipped" >&2
fi
touch "$clients/done"
