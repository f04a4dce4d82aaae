#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m kit.train.cli fit --config committed/ocean-7c1575.yaml "$@"
